"""Record every operation of a training's first steps, for `python -m firstnan diff`.

    python -m firstnan record OUT [--steps 3] train.py --lr 3

A line of `OUT/rank0.jsonl` is an operation of the forward or backward pass, a tensor that existed
before, or an optimizer's update. It holds where the operation ran, its arguments, which lines made
its inputs, and of each output a digest of all bits, the L2 norm and a few values, so that two runs
in different processes, machines or precisions can be compared. Recording starts when the script
first calls a module, and ends the script after `--steps` updates.

With `--inside-updates`, the operations inside of the optimizer's `step()` have lines, too. With
`--values N`, all values of the results of line N are stored in `OUT/rank0.values.pt`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firstnan._norms import as_reals, stored
from firstnan.errors import BAD_INPUT, OK, UserError
from firstnan.microscope import UNINITIALIZED, source_line, storage_key

FORMAT = 2
MOST = 500_000  # operations of a recording
N_VALUES = 16  # of a tensor that are recorded, evenly spaced
_POSITIONAL = 1 << 16  # up to this size the digest depends on the order of all entries
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Operations that make no values of their own.
_SILENT = {"detach", "alias", "lift_fresh", "_local_scalar_dense", "is_same_size", "record_stream"}
_AUTOGRAD: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]


class Digest(NamedTuple):
    """What is recorded of a tensor, on its device until the step ends."""

    shape: list[int]
    stride: list[int]
    dtype: str
    bits: Tensor | None  # int64: sum of the bits; up to _POSITIONAL entries, by their positions
    norm: Tensor | None  # float64: L2 norm
    values: Tensor | None  # float64 `[at most N_VALUES]`

    @classmethod
    def of(cls, x: Tensor) -> Digest:
        """Compute the digest of a tensor of any dtype and layout."""
        shape, dtype = list(x.shape), str(x.dtype).removeprefix("torch.")
        x = stored(x.detach())
        stride = list(x.stride())
        if x.is_meta or not x.numel():
            return cls(shape, stride, dtype, None, None, None)
        reals = as_reals(x).reshape(-1)
        bits = _sum_of_bits(reals)
        norm = None
        if reals.is_floating_point():
            norm = torch.linalg.vector_norm(
                reals, dtype=torch.promote_types(reals.dtype, torch.float32)
            )
        values = reals[:: max(1, len(reals) // N_VALUES)][:N_VALUES].double()
        return cls(shape, stride, dtype, bits, norm, values)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        facts: dict[str, Any] = {"shape": self.shape, "stride": self.stride, "dtype": self.dtype}
        if self.bits is not None and self.values is not None:
            facts["bits"] = int(self.bits)
            facts["values"] = [float(f"{x:.7g}") for x in self.values.tolist()]
        if self.norm is not None:
            facts["norm"] = float(f"{float(self.norm):.9g}")
        return facts


class Trace(TorchDispatchMode):
    """Record the operations that run inside `recording`.

    Args:
        file: where the lines are written; it must not exist.
        steps: number of optimizer updates after which the script ends; None: it goes on.
        inside_updates: record the operations inside of the optimizer's `step()`.
        keep: numbers of the lines of whose results all values are stored.
    """

    def __init__(
        self,
        file: Path,
        steps: int | None = None,
        *,
        inside_updates: bool = False,
        keep: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.n_operations, self.updates = 0, 0
        self.is_compiled = False  # whether a model was given to torch.compile, which is off here
        self.values: dict[int, list[Tensor]] = {}  # of the lines in `keep`
        self._steps = steps
        self._inside_updates, self._is_updating = inside_updates, False
        self._keep_values = frozenset(keep)
        self._file = file.open("x", encoding="utf-8")
        self._pending: list[dict[str, Any]] = []  # lines of the step, with digests on the device
        self._count = itertools.count()
        self._begun = False
        self._pause = threading.local()
        self._modules: list[str] = []
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._n_titles: Counter[str] = Counter()  # models of each class
        # Names of weights and buffers, by storage, and by id, because a storage can be replaced.
        self._weights: dict[int, str] = {}
        self._by_id: dict[int, str] = {}
        self._producer: dict[int, int] = {}  # storage -> line that wrote it last
        self._alive: dict[int, StorageWeakRef] = {}
        self._by_sequence: dict[int, tuple[str, str]] = {}  # autograd's number -> module, line
        self._gradients: list[tuple[str, Tensor]] = []
        self._passes: set[int] = set()  # numbers of the backward passes since the last update
        self._given = 0  # line of the gradients of the update that runs now

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside the block."""
        stance = getattr(torch.compiler, "set_stance", None)
        hooks: list[Any] = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        try:
            with (
                stance("force_eager") if stance else contextlib.nullcontext(),
                warnings.catch_warnings(),
                self,
            ):
                # Hooks of a compiled module and of the module in it are told apart by their names.
                warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are")
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._flush()
            self._file.close()
            if self.values:
                torch.save(self.values, values_file(Path(self._file.name)))

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._begun = True
        if not self._modules:
            self._learn_names(module)
        inner = f"{self._modules[-1]}.{type(module).__name__}" if self._modules else ""
        self._modules.append(self._names.get(module, inner))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()

    def _learn_names(self, root: nn.Module) -> None:
        """Name modules, weights and buffers of a model; a part of a known one keeps its names."""
        if root not in self._names:
            title = type(_unwrapped(root)).__name__
            self._n_titles[title] += 1
            title += f"#{self._n_titles[title]}" if self._n_titles[title] > 1 else ""
            for name, module in root.named_modules():
                name = _plain_name(name)
                self._names[module] = f"{title}.{name}" if name else title
        self.is_compiled |= any(hasattr(m, "_orig_mod") for m in root.modules())
        title = self._names[root]
        for name, x in itertools.chain(root.named_parameters(), root.named_buffers()):
            self._weights[storage_key(x)] = self._by_id[id(x)] = f"{title}.{_plain_name(name)}"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Run one operation and record it."""
        kwargs = kwargs or {}
        if not self._begun or getattr(self._pause, "on", False):
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        space, _, name = func.overloadpacket._qualified_op_name.partition("::")
        if name in _SILENT or space in ("prim", "profiler"):
            return func(*args, **kwargs)
        named = _named(func, args, kwargs)
        given = [(name, x) for name, value in named.items() for x in _tensors(value)]
        inputs = [self._source(x) for _, x in given]
        out = func(*args, **kwargs)
        line: dict[str, Any] = {
            "op": name if space == "aten" else f"{space}.{name}",
            **self._place(),
            "args": _plain_arguments(named),
            "inputs": inputs,
            "given": [name for name, _ in given],
        }
        if func.is_view:
            line["view"] = [list(x.shape) for x in _tensors(out)]
            self._add(line)
            return out
        outputs = {id(x): x for x in [*_tensors(out), *_written(func, args, kwargs)]}
        # Memory that nothing has written yet, or that a collective still writes.
        if name in UNINITIALIZED or space == "c10d":
            number = self._add(line)
            for x in outputs.values():
                self._keep(x, number)
            return out
        if torch.Tag.nondeterministic_seeded in func.tags:
            line["random"] = True
        number = self._add(line, _results(outputs.values()))
        for x in outputs.values():
            self._keep(x, number)
        return out

    def _place(self) -> dict[str, Any]:
        """Return the pass, the module and the source line of the operation that runs now."""
        if (number := torch._C._current_graph_task_id()) != -1:
            self._passes.add(number)
            node: Any = torch._C._current_autograd_node()
            if node is None:
                return {"pass": "backward", "module": "", "line": ""}
            known = self._by_sequence.get(node._sequence_nr(), ("", ""))
            name = node.name().rpartition("::")[2]
            return {"pass": "backward", "module": known[0], "line": known[1], "node": name}
        module = self._modules[-1] if self._modules else ""
        place = source_line()
        line = "" if place is None else f"{_short(place[0])}:{place[1]}"
        if self._is_updating and not module:
            return {"pass": "optimizer", "module": "", "line": line}
        if torch.is_grad_enabled():
            # The node of an operation is made before the operation runs; others make none.
            self._by_sequence.setdefault(_AUTOGRAD._get_sequence_nr() - 1, (module, line))
        return {"pass": "forward", "module": module, "line": line}

    def _source(self, x: Tensor) -> list[Any]:
        """Return which line made an input, and which part of it is read."""
        given = self._by_id.get(id(x))
        x = stored(x)
        key = storage_key(x)
        if key not in self._producer:
            name = self._weights.get(key, given)
            kind = "weight" if name else "state" if self._is_updating else "data"
            line = {"op": kind, "pass": "before", "module": "", "line": "", "name": name or ""}
            self._keep(x, self._add(line, [x]))
        return [self._producer[key], list(x.shape), list(x.stride()), int(x.storage_offset())]

    def _add(self, line: dict[str, Any], outputs: Sequence[Tensor] = ()) -> int:
        number = next(self._count)
        if number >= MOST:
            raise UserError(
                f"more than {MOST:,} operations before update {self.updates + 1}: record fewer "
                "--steps"
            )
        with self._paused():
            digests = [Digest.of(x) for x in outputs]
            if number in self._keep_values:
                self.values[number] = [stored(x.detach()).cpu().clone() for x in outputs]
        self._pending.append({"step": self.updates + 1, **line, "outputs": digests})
        self.n_operations += 1
        return number

    def _keep(self, x: Tensor, number: int) -> None:
        x = stored(x)
        key = storage_key(x)
        self._producer[key] = number
        self._alive[key] = StorageWeakRef(x.untyped_storage())

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self._pause.on = True
        try:
            yield
        finally:
            self._pause.on = False

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._begun:
            return
        owned = list(self._owned(optimizer))
        self._gradients = [(name, p) for name, p, _ in owned if p.grad is not None]
        gradients = [p.grad for _, p in self._gradients if p.grad is not None]
        inputs = [self._source(gradient) for gradient in gradients]
        line = {"op": "gradients", "pass": "update", "module": "", "line": "", "inputs": inputs}
        names = [name for name, _ in self._gradients]
        held = [name for name, *_ in owned]
        line["args"] = {"backward passes": len(self._passes)}
        self._passes.clear()
        self._given = self._add({**line, "names": names, "held": held}, gradients)
        self._is_updating = True
        self._pause.on = not self._inside_updates

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._begun:
            return
        self._is_updating = self._pause.on = False
        settings = {
            name: {k: v for k, v in group.items() if k != "params" and _is_plain(v)}
            for name, _, group in self._owned(optimizer)
        }
        names = [name for name, _ in self._gradients]
        line = {"op": type(optimizer).__name__, "pass": "update", "module": "", "line": ""}
        line |= {"names": names, "settings": settings, "inputs": [[self._given, [], [], 0]]}
        after = [p for _, p in self._gradients]
        number = self._add(line, after)
        for p in after:
            self._keep(p, number)
        self._gradients = []
        self.updates += 1
        self._flush()
        if self.updates == self._steps:
            raise SystemExit(OK)

    def _owned(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield the weights of an optimizer, with name and group."""
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                yield self._by_id.get(id(p), f"group {g}, weight {i}"), p, group

    def _flush(self) -> None:
        """Write the lines of a step, and forget the storages that were freed."""
        with self._paused():
            for line in self._pending:
                outputs = [digest.plain() for digest in line.pop("outputs")]
                self._file.write(json.dumps({**line, "outputs": outputs}) + "\n")
        self._file.flush()
        self._pending = []
        self._by_sequence.clear()
        for key in [key for key, storage in self._alive.items() if storage.expired()]:
            del self._alive[key], self._producer[key]


def lines_file(folder: Path, rank: int) -> Path:
    """Return the file of what one process recorded."""
    return folder / f"rank{rank}.jsonl"


def values_file(lines: Path) -> Path:
    """Return the file of the values that belong to a recording's lines."""
    return lines.with_suffix(".values.pt")


def write_about(folder: Path, script: str) -> None:
    """Write what a recording says of its process: versions, machine and precision."""
    facts = {
        "format": FORMAT,
        "script": script,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
    }
    (folder / "about.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel or a compiled module."""
    for wrapper in _WRAPPERS:
        inner = getattr(module, wrapper.removesuffix("."), None)
        if isinstance(inner, nn.Module):
            return _unwrapped(inner)
    return module


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return "" if f"{name}." in _WRAPPERS else name


def _short(file: str) -> str:
    """Return the last two parts of a path, which is the same on other machines."""
    return "/".join(Path(file).parts[-2:])


def _tensors(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and not x.is_meta]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operation writes."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
    return written


def _sum_of_bits(x: Tensor) -> Tensor:
    """Return a number that depends on all bits of a vector, and in a short one on their order."""
    if len(x) <= _POSITIONAL:
        words = x.view(_WIDTHS[x.dtype.itemsize]).long()
        return (words * torch.arange(1, 2 * len(words), 2, device=x.device)).sum()
    per_word = 8 // x.dtype.itemsize  # a sum of int64 needs no copy
    whole = len(x) - len(x) % per_word
    if x.storage_offset() % per_word:
        x = x.clone()
    rest = x[whole:].view(_WIDTHS[x.dtype.itemsize])
    return x[:whole].view(torch.int64).sum() + rest.sum(dtype=torch.int64)


def _results(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the outputs without bytes beside numbers, the memory that a library works in."""
    outputs = list(outputs)
    has_numbers = any(x.is_floating_point() for x in outputs)
    return [x for x in outputs if not (has_numbers and x.dtype == torch.uint8)]


def _is_plain(value: object) -> bool:
    return (
        value is None
        or type(value) in (bool, int, float, str)
        or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))
    )


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operation by name, also those that have their defaults."""
    named = {a.name: a.default_value for a in func._schema.arguments}
    named |= {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    return {**named, **kwargs}


def _plain_arguments(named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not tensors."""
    plain = {}
    for name, value in named.items():
        if isinstance(value, (torch.dtype, torch.layout)):
            plain[name] = str(value).removeprefix("torch.")
        elif value is not None and _is_plain(value):
            plain[name] = value
    return plain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script, record its first steps, and return the exit code."""
    from firstnan.script import check_script, run

    parser = argparse.ArgumentParser(
        prog="python -m firstnan record",
        description="Run a PyTorch training script, record each operation of its first steps into "
        "a folder, and end it. `python -m firstnan diff A B` names the first that differs.",
    )
    add = parser.add_argument
    add("--steps", type=int, default=3, help="optimizer updates to record (default: 3)")
    inside = "record the operations inside of the optimizer's step(), too"
    add("--inside-updates", action="store_true", help=inside)
    values = "store all values of this operation, whose number `diff` names; may be given again"
    add("--values", type=int, action="append", default=[], metavar="N", help=values)
    add("out", type=Path, help="folder for the recording; it must not hold one")
    add("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    add("script", help="the script to run")
    add("rest", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    options = parser.parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    file = lines_file(options.out, rank)
    try:
        if options.steps < 1:
            raise UserError(f"--steps is {options.steps}; expected at least 1")
        check_script(options.script, options.module)
        if file.exists():
            raise UserError(f"{file} exists: give another folder, or delete this one")
        options.out.mkdir(parents=True, exist_ok=True)
        inside, keep = options.inside_updates, options.values
        trace = Trace(file, options.steps, inside_updates=inside, keep=keep)
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    if rank == 0:
        write_about(options.out, " ".join([options.script, *options.rest]))
    try:
        return run(options.script, options.rest, options.module, trace.recording())
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        what = f"{trace.updates} updates, {trace.n_operations:,} operations"
        compiled = "; torch.compile was off" if trace.is_compiled else ""
        print(f"recorded: {what}, in {options.out}{compiled}", file=sys.stderr)
        if missing := sorted(set(options.values) - set(trace.values)):
            print(f"no operation has the number {missing[0]}: no values of it", file=sys.stderr)
