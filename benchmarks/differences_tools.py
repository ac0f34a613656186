"""Compare tools that compare two trainings: the planted differences that each notices and names.

    python -m benchmarks.differences_tools                         # writes docs/results.md
    python -m benchmarks.differences_tools --nets mlp --seeds 3    # only prints

The 200 differences and 200 equal pairs are those of `benchmarks.differences`. The tools:

- losses: the losses of the two steps, bit for bit. They name nothing by design.
- DebugMode, hashes: `torch.utils._debug_mode.DebugMode` with `log_tensor_hashes`, and what its
  `check_hash_mismatches` says first: an operation, or in an error what differs between the logs.
  Both hashes, the L1 norm and the exclusive or of all bits; of results only, because those of
  inputs differ for uninitialized memory.
- DebugMode, lines: the first two lines that differ between the same logs, read in lockstep, which
  is not a function of DebugMode, but what one does with its text.
- ours: `firstnan diff`, within this process as well.

A report of DebugMode has neither what differs nor the pass, so that it is right if the operation
that it names first is the one that was planted, or the one that made or read what was planted;
`LOGGED` has those for which this is another operation than in `benchmarks.differences`. Ours is
judged more strictly: what differs, the pass and the operation must be right.

The CPU time is that of two steps of the transformer of `benchmarks.nan_tools` with a width of 128,
the recording included and the comparison excluded, relative to the same steps unrecorded.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._debug_mode import DebugMode

from benchmarks.differences import BODIES, FORWARD, PLANTS, STEPS, is_named, record, train
from benchmarks.nan_tools import models
from benchmarks.turns import in_pairs, middle_half, table_head, table_line, write_section
from firstnan.diff import Comparison, Recording
from firstnan.trace import Trace, lines_file

PAIRS = 5
LOGGED = {
    "seed": "uniform_|normal_",
    "batch": "rand",
    "scaling": "mul|div",
    "eval": "bernoulli|empty_like|add_|attention",  # an empty mask; a count of batches
    "dropout seed": "rand",
    "mask": "arange",
    "labels": "slice|nll_loss",
    "detach": "detach",
    "frozen": "aten::t$|mm",  # of the gradient that one of the trainings lacks
    "zero_grad": "zero_grad",
    "lr": "mul_",
    "weight decay": "mul_",
    "optimizer": "RMSprop",
}


class Run(NamedTuple):
    """What the tools have recorded of a training."""

    losses: list[Tensor]
    logs: list[Any]
    recording: Recording


class Report(NamedTuple):
    """What a tool says of two trainings, the second of which may have a planted change."""

    is_different: bool
    is_named: bool = False


@contextmanager
def debug_mode() -> Iterator[DebugMode]:
    """Log each operation with the hashes of its results."""
    with DebugMode(record_nn_module=True) as mode:
        with DebugMode.log_tensor_hashes(["norm", "hash_tensor"]):
            yield mode


@contextmanager
def traced() -> Iterator[None]:
    """Record as `firstnan record` does."""
    with tempfile.TemporaryDirectory() as folder:
        with Trace(lines_file(Path(folder), 0)).recording():
            yield


def run(folder: Path, kind: str, plant: str, seed: int) -> Run:
    """Train a network of a kind under DebugMode, and once more under our recorder."""
    with debug_mode() as mode:
        losses = train(kind, plant, seed)
    return Run(losses, mode.logs, record(folder, kind, plant, seed))


def by_losses(a: Run, b: Run, plant: str) -> Report:
    return Report(any(not x.equal(y) for x, y in zip(a.losses, b.losses, strict=True)))


def by_hashes(a: Run, b: Run, plant: str) -> Report:
    try:
        mismatches = DebugMode.check_hash_mismatches(a.logs, b.logs)
    except ValueError as error:
        return Report(True, is_logged(str(error), plant))
    return Report(True, is_logged(mismatches[0]["call"], plant)) if mismatches else Report(False)


def by_lines(a: Run, b: Run, plant: str) -> Report:
    address = re.compile(" at 0x[0-9a-f]+")
    of_a, of_b = ([address.sub("", call.render([])) for call in x.logs] for x in (a, b))
    for x, y in zip(of_a, of_b, strict=False):
        if x != y:
            return Report(True, any(is_logged(z.partition("(")[0], plant) for z in (x, y)))
    return Report(len(of_a) != len(of_b))


def by_ours(a: Run, b: Run, plant: str) -> Report:
    difference = Comparison(a.recording, b.recording).first()
    return Report(difference is not None, bool(plant) and is_named(difference, PLANTS[plant]))


def is_logged(text: str, plant: str) -> bool:
    """Return whether a text of DebugMode has the operation that was planted."""
    return bool(plant) and bool(re.search(LOGGED.get(plant, PLANTS[plant].op), text))


class Tool(NamedTuple):
    """How a tool compares two trainings, and what it records them in."""

    compare: Callable[[Run, Run, str], Report]
    records: Callable[[], AbstractContextManager[Any]]


TOOLS = {
    "losses": Tool(by_losses, nullcontext),
    "DebugMode, hashes": Tool(by_hashes, debug_mode),
    "DebugMode, lines": Tool(by_lines, debug_mode),
    "ours": Tool(by_ours, traced),
}


def seconds_of_training(records: Callable[[], AbstractContextManager[Any]]) -> float:
    """Return the CPU seconds of two steps of a small transformer."""
    torch.manual_seed(0)
    model, x = models(128)["transformer"]
    labels = torch.randint(1000, x.shape[:-1]).flatten()
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.process_time()
    with records():
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), labels).backward()
            optimizer.step()
    return time.process_time() - began


def cost(records: Callable[[], AbstractContextManager[Any]]) -> str:
    """Return the CPU time of a recorded training, relative to an unrecorded one."""
    plain, recorded = (partial(seconds_of_training, x) for x in (nullcontext, records))
    return middle_half(in_pairs(plain, recorded, PAIRS)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nets", nargs="*", choices=BODIES, default=list(BODIES))
    parser.add_argument("--seeds", type=int, default=20, help="equal pairs of each network")
    parser.add_argument("--show", action="store_true", help="print what is not named")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts = {tool: [0] * 4 for tool in TOOLS}
    with tempfile.TemporaryDirectory() as name:
        for kind in args.nets:
            folder = Path(name) / kind
            plain = run(folder / "plain", kind, "", 0)
            for plant in PLANTS:
                changed = run(folder / plant, kind, plant, 0)
                for tool, count in counts.items():
                    report = TOOLS[tool].compare(plain, changed, plant)
                    count[0] += report.is_different
                    count[1 if plant in FORWARD else 2] += report.is_named
                    if args.show and not report.is_named:
                        print(f"{kind}, {plant}, {tool}: {report}", flush=True)
            for seed in range(args.seeds):
                a, b = (run(folder / f"{side}{seed}", kind, "", seed) for side in "ab")
                for tool, count in counts.items():
                    count[3] += TOOLS[tool].compare(a, b, "").is_different
    half, pairs = len(FORWARD) * len(args.nets), args.seeds * len(args.nets)
    columns = ["tool", f"differences noticed, of {2 * half}", f"named: before the loss, of {half}"]
    columns += [f"named: loss, backward, update, of {half}"]
    columns += [f"equal pairs with a difference, of {pairs}", "CPU time of a recorded training"]
    lines = [table_head(columns)]
    costs = {records: cost(records) for records in {tool.records for tool in TOOLS.values()}}
    for tool, count in counts.items():
        lines.append(table_line([tool, *map(str, count), costs[TOOLS[tool].records]]))
    text = "\n".join(lines) + "\n"
    print(text)
    if len(args.nets) == len(BODIES) and args.seeds == 20:
        write_section("differences_tools", text)


if __name__ == "__main__":
    main()
