"""Name the operation that first made a NaN or an infinity, in any training loop.

For each forward pass of a model, a `Watch` keeps the arguments, the state of the random number
generators, and the gradients at the outputs. After a bad step it runs the model again from there,
forward and backward, and checks every operation with a `Microscope`; it needs neither the loop nor
the loss. With `record=True` it also keeps the range of each module's outputs, to locate the fault
of a step that cannot be repeated.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from firstnan.diagnosis import Diagnosis, diagnose, report
from firstnan.events import Event
from firstnan.faults import Stage
from firstnan.microscope import Fault, Microscope, TensorFacts
from firstnan.norms import is_sharded
from firstnan.ranges import ModuleRanges, floating, is_first_run

if TYPE_CHECKING:
    from firstnan.verdicts import Verdicts

_DEVICES = ("cpu", "cuda")
_CALLS = 8  # most forward passes of one step that are kept, the last ones
OUTSIDE = " (computed before this model)"
_FINDINGS = 8  # most steps that a `Locator` runs again, so that a run that stays sick goes on


@dataclass(frozen=True)
class Finding:
    """The place where the first NaN or infinity was made; `str()` gives a short report.

    Attributes:
        module: the model's class and the module's name in `named_modules`, such as `Net.layers.0`;
            None if the value was made outside the model.
        fault: the operation, its line and the ranges of its inputs; None if the step could not be
            repeated, or if the operation is outside the model.
        diagnosis: the likely cause and what to change; None without `fault`.
        rows: the first eight bad rows of the batch, from 0; empty if all are bad or it is unknown.
        note: further facts, or the reason why no operation is named.
        rank: rank of this process in `torch.distributed`; None if it is not initialized.
    """

    module: str | None
    fault: Fault | None = None
    diagnosis: Diagnosis | None = None
    rows: tuple[int, ...] = ()
    note: str = ""
    rank: int | None = field(default_factory=lambda: _rank())

    @property
    def headline(self) -> str:
        """One line: `aten.log, forward, in Net.act (model.py:12: return x.log()), row 3`."""
        line = "outside of the model" if self.module is None else f"in {self.module}"
        if self.fault is not None:
            direction = "backward" if self.fault.backward else "forward"
            place = f" ({self.fault.place})" if self.fault.place else ""
            line = f"{self.fault.op}, {direction}, {line}{place}"
        if self.rows:
            line += f", row{'s' * (len(self.rows) > 1)} {', '.join(map(str, self.rows))}"
        return line if self.rank is None else f"{line}, rank {self.rank}"

    @property
    def why(self) -> str:
        """The cause in a sentence, or the note if the cause is unknown."""
        return self.note if self.diagnosis is None else self.diagnosis.words

    def __str__(self) -> str:
        """Return a report of a few lines: place, inputs and outputs, cause, what to change."""
        rows = [("first bad", self.headline)]
        if self.fault is not None and self.diagnosis is not None:
            rows += report(self.fault, self.diagnosis)
        rows += [("note", self.note)] if self.note else []
        return "\n".join(f"{name:<11}{value}" for name, value in rows)


def finding_of(fault: Fault, module: str | None, rows: tuple[int, ...] = ()) -> Finding:
    """Return the `Finding` for a fault, with its diagnosis."""
    return Finding(module, fault, diagnose(fault), rows)


@dataclass
class _Call:
    """A forward pass, with everything needed to run it again."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool
    versions: list[int]
    buffers: dict[str, Tensor]  # as they were before, because the pass may change them
    random: dict[str, Tensor]
    autocast: dict[str, torch.dtype]
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by the output's number
    is_done: bool = False

    @property
    def inputs(self) -> list[Tensor]:
        return [x for x in tree_leaves((self.args, dict(self.kwargs))) if isinstance(x, Tensor)]


class Watch:
    """Find the first operation of a model whose result is not finite.

    Call `explain` after the backward pass, before the optimizer changes the weights:

        watch = Watch(model)
        ...
        loss.backward()
        if not loss.isfinite() or not gradients_are_finite(model):
            print(watch.explain())
        optimizer.step()
        watch.forget()

    `Guard(model, optimizer, locate=True)` does this automatically, and
    `python -m firstnan train.py` does it for an unchanged script.

    `explain` runs the model again from its original arguments, so the loop must not overwrite their
    tensors. Dropout draws the same numbers, and hooks on modules run a second time. A model that
    communicates with other ranks (FSDP2's sharded weights, SyncBatchNorm) is not run again; with
    `record=True`, `explain` names its module instead of the operation.

    Until `forget`, the arguments and output gradients of the last eight forward passes stay in
    memory. If the model returns its own loss, only the gradient of the loss is kept.

    Args:
        model: the module that the loop calls; DistributedDataParallel and compiled models are
            unwrapped.
        record: also keep the largest magnitude of each module's outputs in this step.
    """

    def __init__(self, model: nn.Module, *, record: bool = False) -> None:
        self.model, self.ranges = model, ModuleRanges(_inner(model)) if record else None
        self._calls: deque[_Call] = deque(maxlen=_CALLS)
        self._replaying = False
        watch: weakref.ref[Watch] = weakref.ref(self)
        self._hooks = [
            model.register_forward_pre_hook(partial(_before, watch), with_kwargs=True),
            model.register_forward_hook(partial(_after, watch), with_kwargs=True),
            *([] if self.ranges is None else self.ranges.hooks),
        ]
        for hook in self._hooks:
            weakref.finalize(self, hook.remove)

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self.forget()

    def forget(self) -> None:
        """Forget the forward passes of the step."""
        self._calls.clear()
        if self.ranges is not None:
            self.ranges.forget()

    def explain(self) -> Finding | None:
        """Find the first NaN or infinity of this step; return None if all values are finite."""
        notes = []
        for call in self._calls:
            answer = self._explain(call)
            if isinstance(answer, Finding):
                return answer
            notes += [answer] if answer else []
        if self.ranges is not None and (origin := self.ranges.origin()) is not None:
            module, note = origin
            return Finding(module, note="; ".join([note, *notes[:1]]))
        return Finding(None, note=notes[0]) if notes else None

    def _explain(self, call: _Call) -> Finding | str | None:
        """Repeat a forward pass; return its fault, why it cannot run again, or None if healthy."""
        model = _inner(self.model)
        if any(is_sharded(p) for p in model.parameters()):
            return "not repeated: the weights are sharded over ranks"
        if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            return "not repeated: SyncBatchNorm would wait for the other ranks"
        if _versions(call.inputs) != call.versions:
            return "not repeated: the loop has overwritten the model's inputs since"
        top = type(model).__name__
        stack = _Stack(top, {id(m): f"{top}.{name}" for name, m in model.named_modules() if name})
        scope = Microscope(_named(model, call), within=stack)
        self._replaying = True
        try:
            with _as_before(model, call), stack, scope:
                outputs, gradients = _repeat(model, call)
        except Exception as error:  # whatever the model raises must not end the training
            line = str(error).strip().partition("\n")[0]
            return f"not repeated: {type(error).__name__}: {line}"
        finally:
            self._replaying = False
        fault = scope.fault(*outputs)
        outside = [g for g in call.gradients.values() if not bool(torch.isfinite(g).all())]
        if fault is None and outside:
            facts = "; ".join(str(TensorFacts.of(x)) for x in outputs)
            note = f"the model's outputs are finite ({facts}), but the gradient there is not"
            return Finding(None, rows=TensorFacts.of(outside[0]).bad_rows, note=note)
        fault = fault or scope.fault(*gradients)
        return fault and finding_of(fault, fault.module or top, _rows(fault, call))


class Locator:
    """Run a `Watch` in the first step of a series of bad steps, at most eight times in a run."""

    def __init__(self, model: nn.Module | None) -> None:
        self._watch = None if model is None else Watch(model)
        self.findings: dict[int, Finding] = {}  # by step, of this rank
        self._n_located = 0
        self._lines: list[str] = []  # of this step, on all ranks

    def forget(self) -> None:
        """Forget the step."""
        self._lines = []
        if self._watch is not None:
            self._watch.forget()

    def judge(self, step: int, stage: Tensor, streak: Tensor, ranks: Verdicts | None) -> None:
        """Locate the fault of parts that have just become not finite; ranks share the results."""
        new = [Stage(number).kind for number in stage[streak == 0].tolist()]
        is_due = self._n_located < _FINDINGS and any(kind.not_finite for kind in new)
        if self._watch is None or not is_due:
            return
        self._n_located += 1
        line = ""
        if (finding := self._watch.explain()) is not None:
            self.findings[step] = finding
            line = f"{finding.headline}: {finding.why}"
        lines = [line] if ranks is None else ranks.share(step, line)
        self._lines = [line for line in lines if line]

    def events(self, step: int) -> list[Event]:
        """Return an event for each operation that some rank located in this step."""
        return [Event(step, "model", "origin", line, "located") for line in self._lines]

    def lines(self) -> list[str]:
        """Return a report for each finding."""
        return [f"Step {step}:\n{finding}" for step, finding in self.findings.items()]


def _listening(reference: weakref.ref[Watch]) -> Watch | None:
    watch = reference()
    return watch if watch is not None and not watch._replaying and is_first_run() else None


def _before(reference: weakref.ref[Watch], module: nn.Module, args: tuple, kwargs: dict) -> None:
    watch = _listening(reference)
    if watch is not None and torch.is_grad_enabled():
        # All of them: BatchNorm writes its statistics without a trace in `_version`.
        buffers = {
            name: buffer.detach().clone()
            for name, buffer in _inner(module).named_buffers()
            if module.training and buffer.is_floating_point()
        }
        call = _Call(args, kwargs, module.training, [], buffers, _random_states(), _autocast())
        call.versions += _versions(call.inputs)
        watch._calls.append(call)


def _after(
    reference: weakref.ref[Watch], module: nn.Module, args: tuple, kwargs: dict, output: Any
) -> None:
    watch = _listening(reference)
    if watch is None or not watch._calls or watch._calls[-1].is_done:
        return
    watch._calls[-1].is_done = True
    call = weakref.ref(watch._calls[-1])
    outputs = [(i, x) for i, x in enumerate(floating(output)) if x.requires_grad]
    losses = [(i, x) for i, x in outputs if x.ndim == 0]  # the other outputs lead to it
    for i, x in losses or outputs:
        x.register_hook(partial(_keep_gradient, call, i))


def _keep_gradient(reference: weakref.ref[_Call], number: int, gradient: Tensor) -> None:
    if (call := reference()) is not None:
        call.gradients[number] = gradient.detach()


def _repeat(model: nn.Module, call: _Call) -> tuple[list[Tensor], list[Tensor]]:
    buffers = {name: call.buffers.get(name, b).clone() for name, b in model.named_buffers()}
    output = torch.func.functional_call(model, buffers, call.args, dict(call.kwargs))
    outputs = floating(output)
    ends = [i for i in call.gradients if i < len(outputs) and outputs[i].requires_grad]
    sources = [p for p in model.parameters() if p.requires_grad]
    sources += [x for x in call.inputs if x.requires_grad]
    if not ends or not sources:
        return outputs, []
    gradients = torch.autograd.grad(
        [outputs[i] for i in ends],
        sources,
        [call.gradients[i] for i in ends],
        allow_unused=True,
    )
    return outputs, [g for g in gradients if g is not None]


@contextlib.contextmanager
def _as_before(model: nn.Module, call: _Call) -> Iterator[None]:
    """Restore the random numbers, precision and mode that a forward pass began with."""
    devices = [int(name) for name in call.random if name != "cpu"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.set_rng_state(call.random["cpu"])
        for device in devices:
            torch.cuda.set_rng_state(call.random[str(device)], device)
        for device in _DEVICES:
            kind = call.autocast.get(device)
            if kind is not None or torch.is_autocast_enabled(device):
                enabled = kind is not None
                stack.enter_context(torch.autocast(device, dtype=kind, enabled=enabled))
        modes = [(module, module.training) for module in model.modules()]
        if model.training != call.training:
            model.train(call.training)
            stack.callback(lambda: [setattr(module, "training", was) for module, was in modes])
        yield


class _Stack:
    """Track which module's operations run now, for a `Microscope`.

    In the backward pass, that is the module whose output gradient was computed last.
    """

    def __init__(self, top: str, names: Mapping[int, str]) -> None:
        self._names, self._open = names, [top]
        self._backward: str | None = None

    def __call__(self) -> str:
        return self._open[-1] if self._backward is None else self._backward

    def __enter__(self) -> None:
        self._hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, _: object) -> None:
        self._open.append(self._names.get(id(module), self._open[-1]))

    def _leave(self, module: nn.Module, _: object, output: object) -> None:
        name = self._open.pop()
        for x in floating(output):
            if x.requires_grad and x.grad_fn is not None:
                x.register_hook(partial(self._reach, name))

    def _reach(self, name: str, _: Tensor) -> None:
        self._backward = name


def _named(model: nn.Module, call: _Call) -> dict[str, Tensor]:
    inputs = [x for x in call.inputs if x.is_floating_point() or x.is_complex()]
    named = {f"input {i}{OUTSIDE * (x.grad_fn is not None)}": x for i, x in enumerate(inputs)}
    named |= {f"weight {name}": p for name, p in model.named_parameters()}
    buffers = {name: call.buffers.get(name, b) for name, b in model.named_buffers()}
    named |= {f"buffer {name}": b for name, b in buffers.items() if b.is_floating_point()}
    return named | {f"gradient at output {i}": g for i, g in call.gradients.items()}


def _rows(fault: Fault, call: _Call) -> tuple[int, ...]:
    facts = fault.outputs[0]
    size = facts.shape[0] if len(facts.shape) > 1 else 0
    is_batch = size in {len(x) for x in call.inputs if x.ndim}
    return facts.bad_rows if is_batch and len(facts.bad_rows) < size else ()


def _inner(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _versions(tensors: list[Tensor]) -> list[int]:
    return [-1 if x.is_inference() else x._version for x in tensors]


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states


def _autocast() -> dict[str, torch.dtype]:
    return {
        device: torch.get_autocast_dtype(device)
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    }


def _rank() -> int | None:
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if initialized else None
