"""Read what `firstnan record` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstnan.errors import UserError
from firstnan.trace import FORMAT, lines_file, values_file

FACTORS = {"mul": "multiplies", "div": "divides"}
_NAMED = 4  # operations that are listed

Digest = Mapping[str, Any]


@dataclass
class Operation:
    """A line of a recording."""

    number: int
    step: int
    op: str
    direction: str  # before, forward, backward, update, or optimizer: inside of an update
    module: str
    line: str
    node: str  # of autograd, in the backward pass
    args: dict[str, Any]
    inputs: list[list[Any]]  # number of the operation, shape, stride, offset
    given: list[str]  # the argument of each input
    outputs: list[Digest]
    names: list[str]  # of weights, within the model: its class may have another name
    held: set[str]  # names of all weights of an optimizer
    settings: dict[str, dict[str, Any]]  # of an optimizer, for each weight
    is_random: bool
    is_view: bool

    @classmethod
    def of(cls, number: int, line: Mapping[str, Any]) -> Operation:
        """Return the operation of a line; the weights of an update are in the order of names."""
        names = line.get("names", [line["name"]] if line.get("name") else [])
        order = sorted(range(len(names)), key=names.__getitem__)
        inputs, outputs = line.get("inputs", []), line["outputs"]
        if "names" in line:
            outputs = [outputs[i] for i in order]
            inputs = [inputs[i] for i in order] if len(inputs) == len(names) else inputs
        return cls(
            number,
            line["step"],
            line["op"],
            line["pass"],
            line["module"],
            line["line"],
            line.get("node", ""),
            line.get("args", {}),
            inputs,
            line.get("given", []),
            outputs,
            [within(names[i]) for i in order],
            {within(name) for name in line.get("held", [])},
            {within(name): own for name, own in line.get("settings", {}).items()},
            line.get("random", False),
            "view" in line,
        )

    @property
    def name(self) -> str:
        """The operation, whether in place or not."""
        return self.op.rstrip("_")

    @property
    def kind(self) -> tuple[str, ...]:
        """The pass, the module within the model, and the operation, in place or not."""
        if self.direction == "update":
            return "update", "gradients" if self.op == "gradients" else "optimizer"
        if self.direction == "before":
            output = self.outputs[0]
            kind = "".join(c for c in output["dtype"] if c.isalpha())  # float, int or bool
            return "before", self.op, kind.removeprefix("b"), str(len(output["shape"]))
        return self.direction, self.module.partition(".")[2], self.name

    @property
    def key(self) -> tuple[Any, ...]:
        """What a pair of operations has in common: kind and shapes.

        The shapes tell apart the products of one node, for its weight and for its input.
        """
        if self.direction in ("update", "before"):
            return self.kind
        return *self.kind, tuple(tuple(output["shape"]) for output in self.outputs)

    def __str__(self) -> str:
        """Return a line such as `mul, forward, in Net.norm (train.py:12)`."""
        if self.direction in ("before", "update"):
            names = listed(self.names, 1)
            of = "" if self.op == "weight" else "of "
            return (
                f"{self.op} {of}{names}, {self.direction}"
                if names
                else f"{self.op}, {self.direction}"
            )
        where = f", in {self.module}" if self.module else ""
        line = f" ({self.line})" if self.line else ""
        return f"{self.op}, {self.direction}{where}{line}"


def within(name: str) -> str:
    """Return the name of a weight within its model, without the name of the model's class."""
    return name.partition(".")[2] or name


@dataclass
class Recording:
    """What one process recorded."""

    about: dict[str, Any]
    operations: list[Operation]
    values: dict[int, list[Tensor]] = field(default_factory=dict)  # of some operations, whole

    @classmethod
    def read(cls, folder: Path, rank: int) -> Recording:
        """Read a folder that `record` wrote.

        Raises:
            UserError: it holds no recording of this rank, or one of another version.
        """
        file = lines_file(folder, rank)
        if not file.is_file() or not (folder / "about.json").is_file():
            raise UserError(
                f"{folder} holds no recording of rank {rank}; make one with python -m firstnan "
                f"record {folder} SCRIPT"
            )
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        if about.get("format") != FORMAT:
            raise UserError(
                f"{folder} has the format {about.get('format')}, expected {FORMAT}: record both "
                "runs with one version of firstnan"
            )
        with file.open(encoding="utf-8") as lines:
            operations = [Operation.of(i, json.loads(line)) for i, line in enumerate(lines)]
        whole = values_file(file)
        values = torch.load(whole, weights_only=True) if whole.is_file() else {}
        return cls(about, operations, values)


def ancestors(
    start: Operation, run: Recording, partner: Mapping[int, Operation]
) -> list[Operation]:
    """Return the operations of one run alone that made a value, the earliest first."""
    found: dict[int, Operation] = {}
    ahead = [start]
    while ahead:
        op = ahead.pop()
        if op.number not in partner and op.number not in found:
            found[op.number] = op
            ahead += [run.operations[number] for number, *_ in op.inputs]
    return [found[number] for number in sorted(found)]


def loss_of(run: Recording, step: int) -> Operation | None:
    """Return what makes one number before a step's first backward pass, but for a factor."""
    found = None
    for op in run.operations:
        if op.step == step and op.direction == "backward":
            break
        is_number = [x["shape"] for x in op.outputs[:1]] == [[]]
        # The gradient of the loss itself is ones_like.
        if op.direction == "forward" and is_number and op.name not in {"ones_like", *FACTORS}:
            found = op
    return found


def listed(texts: Sequence[str], most: int = _NAMED) -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
