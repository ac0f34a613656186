"""Name the operation that first made a NaN or an infinity, in any training loop.

After a bad step, a `Watch` runs the model again under a `Microscope`, which checks each operation.
It needs neither the loop nor the loss.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from firstnan._graph import Origin, origin_of
from firstnan._hooks import version_of, weakly
from firstnan._norms import are_finite, is_sharded
from firstnan._recorder import Recorder, floating, is_first_run, repeating
from firstnan.agreement import Agreement, several_ranks
from firstnan.diagnosis import Diagnosis, diagnose, report
from firstnan.events import Event
from firstnan.faults import Stage
from firstnan.microscope import Fault, Microscope, TensorFacts

_DEVICES = ("cpu", "cuda")
_CALLS = 8  # most forward passes of one step that are kept, the last ones
OUTSIDE = " (computed before this model)"
FINITE_AGAIN = "run again, the step was finite; record=True names the module"
_NOT_FOUND = (
    "run again, the models of this step did not repeat the fault: it was made outside of them, "
    "such as in the loss, by numbers that differ from run to run, or on another rank"
)
_FINDINGS = 8  # most steps that a `Locator` runs again, so that a run that stays sick goes on


@dataclass(frozen=True)
class Finding:
    """The place where the first NaN or infinity was made; `str()` gives a short report.

    Attributes:
        module: the model's class and the module's name in `named_modules`, such as `Net.layers.0`;
            None if the value was made outside the model, or if the place is unknown.
        fault: the operation, its line and the ranges of its inputs; None if the step could not be
            repeated, or if the operation is outside the model.
        rows: the first eight bad rows of the batch, from 0; empty if all are bad or it is unknown.
        rows_in_words: all bad rows, such as `rows 0 to 3, 7` or `all 8 rows`; "" if unknown.
        note: further facts, or the reason why no operation is named.
        lines: the ranges that a `Recorder` has seen, as lines of the report: label, text.
        is_outside: whether the value was made outside the model.
        step: number of the step, from 1; None if it is unknown.
        rank: rank of this process in `torch.distributed`; None with only one.
    """

    module: str | None
    fault: Fault | None = None
    rows: tuple[int, ...] = ()
    note: str = ""
    rows_in_words: str = ""
    lines: tuple[tuple[str, str], ...] = ()
    is_outside: bool = False
    step: int | None = None
    rank: int | None = field(default_factory=lambda: dist.get_rank() if several_ranks() else None)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The likely cause and what to change; None without `fault`."""
        return self.fault and diagnose(self.fault)

    @property
    def headline(self) -> str:
        """One line: `aten.log, forward, in Net.act (model.py:12: return x.log()), row 3`."""
        line = "outside of the model" if self.is_outside else "place unknown"
        line = line if self.module is None else f"in {self.module}"
        if self.fault is not None:
            direction = "backward" if self.fault.backward else "forward"
            place = f" ({self.fault.place})" if self.fault.place else ""
            line = f"{self.fault.op}, {direction}, {line}{place}"
        line += "" if self.step is None else f", step {self.step}"
        line += "" if self.rank is None else f", rank {self.rank}"
        return line + (f", {self.rows_in_words}" if self.rows_in_words else "")

    @property
    def why(self) -> str:
        """The cause in a sentence, or the note if the cause is unknown."""
        return self.note if self.diagnosis is None else self.diagnosis.words

    def __str__(self) -> str:
        """Return a report of a few lines: place, inputs and outputs, cause, what to change."""
        rows = [("first bad", self.headline), *self.lines]
        if self.fault is not None and self.diagnosis is not None:
            rows += report(self.fault, self.diagnosis)
        rows += [("note", self.note)] if self.note else []
        return "\n".join(f"{name:<11}{value}" for name, value in rows)


def first_finding(
    watches: Iterable[Watch], step: int, losses: Iterable[Tensor] = ()
) -> tuple[Finding, Watch] | None:
    """Return the first fault of a step, of models in the order of their forward passes."""
    pairs = [(found, watch) for watch in watches if (found := watch.explain()) is not None]
    if not are_finite(losses):  # what made a loss bad came before any gradient
        pairs = [(x, watch) for x, watch in pairs if x.fault is None or not x.fault.backward]

    def order(i: int) -> tuple[int, bool, bool, int]:
        found, _ = pairs[i]
        if found.fault is None:
            return 2, found.note == FINITE_AGAIN, found.module is None, i
        if found.fault.backward:  # backward passes run in the reverse order
            return 1, False, False, -i
        return 0, OUTSIDE in (found.fault.poisoned or ""), False, i

    if not pairs:
        return None
    found, watch = pairs[min(range(len(pairs)), key=order)]
    return replace(found, step=step), watch


class LossOrigin:
    """What made a loss not finite, read before its backward pass and kept until the step ends."""

    def __init__(self) -> None:
        self._origin: Origin | None = None

    def read(
        self, losses: Iterable[Tensor], watches: Collection[Watch], *, waits: bool = False
    ) -> None:
        """Look for the first bad operation between the models and losses that are not finite.

        Without `waits`, losses on devices that would have to be waited for are not looked at.
        """
        if self._origin is not None or not is_first_run():
            return
        given = [x for x in losses if type(x) is Tensor and x.numel() == 1 and not x.is_complex()]
        bad = [
            x for x in given if (waits or x.device.type == "cpu") and not math.isfinite(x.item())
        ]
        if bad:
            self._origin = origin_of(bad, lambda i: any(watch.made(i) for watch in watches))

    def better(self, first: Finding | None, watch: Watch | None) -> Finding | None:
        """Return what was read as a finding, if the watches name neither operation nor module."""
        origin, fault = self._origin, first and first.fault
        if origin is None or (first is not None and first.module is not None and fault is None):
            return first
        if fault is not None and not fault.backward:  # a backward pass came later
            is_elsewhere = OUTSIDE in (fault.poisoned or "")
            if not is_elsewhere or watch is None or not watch.follows(origin.number):
                return first
        first = first or Finding(None)
        return replace(first, module=None, fault=origin.fault, note=origin.note, is_outside=True)

    def forget(self) -> None:
        """Forget the step."""
        self._origin = None


@dataclass
class Call:
    """A forward pass, with everything needed to run it again."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool
    buffers: dict[str, Tensor]  # as they were before, because the pass may change them
    random: dict[str, Tensor]
    autocast: dict[str, tuple[torch.dtype, bool]]
    forward: Any = None  # of the instance: TRL and Lightning redirect a call to another method
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by the output's number

    def __post_init__(self) -> None:
        self.versions = list(map(version_of, self.inputs))

    def keep_gradient(self, number: int, gradient: Tensor) -> None:
        """Keep the gradient at an output, as a hook of it."""
        self.gradients[number] = gradient.detach()

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
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

    `explain` runs the model again from its original arguments, so the loop must not overwrite those
    that are floats. Dropout draws the same numbers, and hooks on modules run again. A model that
    communicates with other ranks (FSDP2's sharded weights, SyncBatchNorm) is not run again; with
    `record=True`, `explain` names its module instead of the operation.

    Until `forget`, the arguments and output gradients of the last eight forward passes stay in
    memory. If the model returns its own loss, only the gradient of the loss is kept.

    Args:
        model: the module that the loop calls; DistributedDataParallel and compiled models are
            unwrapped. Call `model.compile()` before this.
        record: also keep the ranges of the values and gradients between modules, of this step and
            the eight before it, as is always done for a model that is not run again.
        hooks: call `before` and `after` by hooks; False if the caller calls them.
    """

    def __init__(self, model: nn.Module, *, record: bool = False, hooks: bool = True) -> None:
        self.model, self.step = model, 1
        self.calls: deque[Call] = deque(maxlen=_CALLS)
        # Autograd's numbers of the operations of each forward pass: the first, and that after it.
        self._numbers: list[list[int]] = []
        is_recorded = record or bool(_why_not_repeated(inner_of(model)))
        self.recorder = Recorder(inner_of(model)) if is_recorded else None
        self._undo = [hook.remove for hook in self.recorder.hooks] if self.recorder else []
        before, after = weakly(self.before), weakly(self.after)
        compiled: Any = model._compiled_call_impl

        def watched(*args: Any, **kwargs: Any) -> Any:
            before(model, args, kwargs)
            output = compiled(*args, **kwargs)
            after(model, args, output)
            return output

        if hooks and compiled is not None:  # by `model.compile()`, which would compile hooks, too
            model._compiled_call_impl = watched
            self._undo.append(partial(setattr, model, "_compiled_call_impl", compiled))
        elif hooks:
            self._undo.append(model.register_forward_pre_hook(before, with_kwargs=True).remove)
            self._undo.append(model.register_forward_hook(after).remove)
        for undo in self._undo:
            weakref.finalize(self, undo)

    def close(self) -> None:
        """Remove all hooks."""
        for undo in self._undo:
            undo()
        self.forget()

    def forget(self) -> None:
        """Forget the forward passes of the step, and begin the next one."""
        self.step += 1
        self.calls.clear()
        self._numbers.clear()
        if self.recorder is not None:
            self.recorder.forget()

    def explain(self) -> Finding | None:
        """Find the first NaN or infinity of this step; return None if all values are finite."""
        answers = [x for call in self.calls if (x := self._explain(call)) is not None]
        found = min(answers, key=lambda x: x.fault is None, default=None)
        if self.recorder is not None and (origin := self.recorder.origin()) is not None:
            module, words, lines = origin
            if found is None or found.fault is None:
                note = "; ".join([words, *(x.note for x in answers[:1])])
                found = Finding(module, note=note, is_outside=module is None)
            found = replace(found, lines=lines)
        return found and replace(found, step=self.step)

    def made(self, number: int) -> bool:
        """Return whether the operation of this number in autograd ran in the model."""
        return any(first <= number < end for first, end in self._numbers)

    def follows(self, number: int) -> bool:
        """Return whether the model was called after the operation of this number in autograd."""
        return any(number < first for first, _ in self._numbers)

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Keep what a forward pass begins with."""
        if not is_first_run() or not torch.is_grad_enabled():
            return
        kinds = {d: (torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in _DEVICES}
        buffers: dict[str, Tensor] = {}
        for path, part in inner_of(module).named_modules():
            prefix = f"{path}." if path else ""
            for name, x in part._buffers.items() if module.training else ():
                # All of them: BatchNorm writes its statistics without a trace in `_version`.
                if x is not None and x.is_floating_point():
                    buffers[prefix + name] = x.detach().clone()
            for name, p in part._parameters.items():
                if p is not None and not isinstance(p, nn.Parameter):  # of `torch.func`
                    buffers[prefix + name] = p
        state = _random_states(), kinds, vars(inner_of(module)).get("forward")
        # Loaders write the next token ids into the same tensor before the optimizer steps.
        copy = lambda x: x.clone() if x.dtype == torch.int64 else x  # noqa: E731
        args, kwargs = tree_map_only(Tensor, copy, (args, kwargs))
        self.calls.append(Call(args, kwargs, module.training, buffers, *state))
        self._numbers.append([_next_number()] * 2)

    def after(self, module: nn.Module, args: tuple, output: object) -> None:
        """Keep the gradients at the outputs of a forward pass, once they are computed."""
        if not is_first_run() or not torch.is_grad_enabled() or not self.calls:
            return
        call = self.calls[-1]
        self._numbers[-1][1] = _next_number()
        outputs = [(i, x) for i, x in enumerate(floating(output)) if x.requires_grad]
        losses = [(i, x) for i, x in outputs if x.ndim == 0]  # the other outputs lead to it
        for i, x in losses or outputs:
            x.register_hook(weakly(call.keep_gradient, i))

    def passes_of(self, path: str) -> list[Call]:
        """Run the first bad pass again; return the passes of a submodule within it."""
        model = inner_of(self.model)
        answers = [(call, self._explain(call)) for call in self.calls]
        bad = [x for x, found in answers if found and not found.note.startswith("not repeated")]
        part = Watch(model.get_submodule(path))
        for call in bad[:1]:
            with _as_before(model, call, Recorder(model)):
                repeating.clear()  # so that `part` takes notice
                _repeat(model, call)
        return list(part.calls)

    def _explain(self, call: Call) -> Finding | None:
        """Repeat a forward pass; return its fault, or why it cannot run again."""
        model = inner_of(self.model)
        if why := _why_not_repeated(model, call):
            return Finding(None, note=f"not repeated: {why}")
        stack = Recorder(model)
        scope = Microscope(_named(model, call), within=stack.running)
        try:
            with _as_before(model, call, stack), scope:
                outputs, gradients = _repeat(model, call)
        except Exception as error:  # whatever the model raises must not end the training
            line = str(error).strip().partition("\n")[0]
            return Finding(None, note=f"not repeated: {type(error).__name__}: {line}")
        fault = scope.fault(*outputs)
        outside = {i: g for i, g in call.gradients.items() if not are_finite([g])}
        if fault is None and outside:
            facts = "; ".join(str(TensorFacts.of(outputs[i])) for i in outside if i < len(outputs))
            note = f"run again, the outputs are finite ({facts}), but the gradient there is not"
            rows, words = _rows(TensorFacts.of(next(iter(outside.values()))), call)
            return Finding(None, None, rows, note, words, is_outside=True)
        fault = fault or scope.fault(*gradients)
        if fault is None and not are_finite([p.grad for p in model.parameters()]):
            return Finding(None, note=FINITE_AGAIN)
        module = fault and (fault.module or type(model).__name__)
        rows, words = _rows(fault.outputs[0], call) if fault else ((), "")
        return fault and Finding(module, fault, rows, rows_in_words=words)


class Locator:
    """Run a `Watch` in the first step of a series of bad steps, at most eight times in a run.

    Of a container without `forward`, such as a ModuleDict, the children are watched.
    """

    def __init__(self, model: nn.Module, locate: bool | Sequence[nn.Module]) -> None:
        models = ([model] if locate else []) if isinstance(locate, bool) else locate
        self._watches: list[Watch] = []
        for m in models:
            bare = getattr(m.forward, "__func__", None) is nn.Module.forward
            self._watches += [Watch(x) for x in (m.children() if bare else [m])]
        self.findings: dict[int, Finding] = {}  # by step, of this rank
        self.reports: dict[int, object] = {}  # findings, or a sentence why there is none
        self._n_located = 0
        self._loss = LossOrigin()
        self.events: list[Event] = []  # of this step: an operation that some rank located

    def forget(self) -> None:
        """Forget the step."""
        self.events = []
        self._loss.forget()
        for watch in self._watches:
            watch.forget()

    def read(self, losses: Iterable[Tensor]) -> None:
        """Look for the operation that made a loss not finite, before its backward pass."""
        if self._watches and self._n_located < _FINDINGS:
            self._loss.read(losses, self._watches)

    def judge(self, step: int, stage: Tensor, streak: Tensor, ranks: Agreement) -> None:
        """Locate the fault of parts that have just become not finite; ranks share the results."""
        if not self._watches or self._n_located == _FINDINGS:
            return
        pairs = zip(stage.tolist(), streak.tolist(), strict=True)
        if not any(Stage(number).kind.not_finite for number, bad in pairs if not bad):
            return
        self._n_located += 1
        line = ""
        self.reports[step] = _NOT_FOUND
        finding = self._loss.better(*first_finding(self._watches, step) or (None, None))
        if finding is not None and finding.note != FINITE_AGAIN:  # else another rank's, or huge
            self.findings[step] = self.reports[step] = finding
            line = f"{finding.headline}: {finding.why}"
        lines = ranks.gather(f"step {step}: what was located", line)
        self.events = [Event(step, "model", "origin", x, "located") for x in lines if x]


def _repeat(model: nn.Module, call: Call) -> tuple[list[Tensor], list[Tensor]]:
    if call.forward is not None:
        model.forward = call.forward
    state = {**dict(model.named_buffers()), **call.buffers}
    state = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in state.items()}
    output = torch.func.functional_call(model, state, call.args, dict(call.kwargs))
    outputs = floating(output)
    ends = [i for i in call.gradients if i < len(outputs) and outputs[i].requires_grad]
    sources = [p for p in model.parameters() if p.requires_grad]
    sources += [x for x in [*call.inputs, *state.values()] if x.requires_grad]
    if not ends or not sources:
        return outputs, []
    roots, seeds = [outputs[i] for i in ends], [call.gradients[i] for i in ends]
    try:
        gradients = torch.autograd.grad(roots, sources, seeds, allow_unused=True)
    except RuntimeError:  # reentrant checkpointing allows no `autograd.grad`
        if are_finite(outputs):
            raise
        gradients = ()
    return outputs, [g for g in gradients if g is not None]


@contextlib.contextmanager
def _as_before(model: nn.Module, call: Call, recorder: Recorder) -> Iterator[None]:
    """Restore the random numbers, precision and mode that a forward pass began with."""
    devices = [int(name) for name in call.random if name != "cpu"]
    with contextlib.ExitStack() as stack:
        repeating.append(recorder)  # the hooks of all others pause
        for undo in (repeating.clear, *(hook.remove for hook in recorder.hooks)):
            stack.callback(undo)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.set_rng_state(call.random["cpu"])
        for device in devices:
            torch.cuda.set_rng_state(call.random[str(device)], device)
        for device, (kind, enabled) in call.autocast.items():
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, kind, enabled))
        modes = [(module, module.training) for module in model.modules()]
        if model.training != call.training:
            model.train(call.training)
            stack.callback(lambda: [setattr(module, "training", was) for module, was in modes])
        yield


def _named(model: nn.Module, call: Call) -> dict[str, Tensor]:
    inputs = [x for x in call.inputs if x.is_floating_point() or x.is_complex()]
    named = {f"input {i}{OUTSIDE * (x.grad_fn is not None)}": x for i, x in enumerate(inputs)}
    named |= {f"weight {name}": p for name, p in model.named_parameters()}
    buffers = {name: call.buffers.get(name, b) for name, b in model.named_buffers()}
    named |= {f"buffer {name}": b for name, b in buffers.items() if b.is_floating_point()}
    return named | {f"gradient at output {i}": g for i, g in call.gradients.items()}


def _rows(facts: TensorFacts, call: Call) -> tuple[tuple[int, ...], str]:
    """Return the first eight bad rows of a batch, none if all are bad, and all in words."""
    size = facts.shape[0] if len(facts.shape) > 1 else 0
    if size not in {x.size(0) for x in call.inputs if x.ndim}:
        return (), ""
    return facts.bad_rows if len(facts.bad_rows) < size else (), facts.rows


def inner_of(model: nn.Module) -> nn.Module:
    """Return the module inside of wrappers such as DistributedDataParallel."""
    is_parallel = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
    inner = model.module if is_parallel else getattr(model, "_orig_mod", None)
    return inner_of(inner) if isinstance(inner, nn.Module) else model


def _why_not_repeated(model: nn.Module, call: Call | None = None) -> str:
    if call is not None and list(map(version_of, call.inputs)) != call.versions:
        return "the loop has overwritten the model's inputs since"
    if any(is_sharded(p) for p in model.parameters()):
        return "the weights are sharded over ranks"
    is_synced = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return "SyncBatchNorm would wait for the other ranks" if is_synced else ""


def _next_number() -> int:
    """Return the number that autograd will give the next operation of this thread."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states
