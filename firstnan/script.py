"""Run a training script unchanged, and name the operation that first produced a NaN or an infinity.

    python -m firstnan train.py --lr 3
    python -m firstnan --on-bad skip -m my_project.train --lr 3

Each model that the script calls gets a `Watch`. Before each `optimizer.step()`, the loss and all
gradients are checked for finite values, at the cost of one device synchronization per step. A
healthy run has the same results and random numbers as without the guard.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from firstnan._hooks import nodes
from firstnan._norms import are_finite, as_reals, norm_of
from firstnan._optimizers import judged_first, unscale_
from firstnan._recorder import is_first_run, is_transformed
from firstnan._skipped_steps import give_back, is_skipping, skipping, withhold
from firstnan.agreement import Agreement, several_ranks
from firstnan.bundle import save
from firstnan.bundle_file import library
from firstnan.errors import BAD_INPUT, FAILED, GUARD_STOPPED, OK, UserError
from firstnan.microscope import Microscope
from firstnan.watch import FINITE_AGAIN, OUTSIDE, Finding, LossOrigin, Watch, first_finding

_OVERFLOWS = 5  # in a row before they are reported: a loss scale starts a few halvings too large
_REPORTS = 8  # most reports of a run that goes on; each runs models again


class ScriptWatch:
    """Watch every model, loss and optimizer of this process inside the block of `watching`.

    The options are the flags of the command; `report` is called with the text of each report.
    """

    def __init__(
        self,
        on_bad: str = "stop",
        *,
        record: bool = False,
        every_op: bool = False,
        bundle: Path | None = None,
        report: Callable[[str], object],
    ) -> None:
        self.on_bad = on_bad
        self.record = record
        self.every_op = every_op
        self.report = report
        self.bundle = bundle
        self.steps, self.bad = 0, 0  # counts of optimizer steps, and of those not finite
        self._watches: dict[nn.Module, Watch] = {}  # in the order of the first calls
        self._losses: list[Tensor] = []
        self._origin = LossOrigin()
        self._stale: set[nn.Module] = set()  # models that have been updated since their passes
        self._backwards = 0
        self._checked = 0
        self._overflows = 0
        self._is_scaled = False  # by a GradScaler, under which gradients may overflow
        # Reports a bad first backward pass, unless an optimizer's step follows, which is judged.
        self._pending: Callable[[], None] | None = None
        self._bad_passes = 0  # backward passes in a row that were bad, without a step
        self._is_transformed = False  # whether torch.func has run a model
        self._held_weights: set[int] = set()  # ids of the weights that an optimizer holds
        self._n_held: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._n_unheld = 0  # weights with a gradient that no optimizer holds
        self._ranks: Agreement | None = None  # made at the first step, after the process group
        self._skips = False  # whether the present step is left out
        self._withheld: list[tuple[Tensor, Tensor | None]] = []  # its weights and their gradients
        self._others: WeakKeyDictionary[Optimizer, Optimizer] = WeakKeyDictionary()  # stand-ins
        self._inside = threading.local()
        self._scopes = contextlib.ExitStack()
        self._scope: Microscope | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all models, losses and optimizers that run inside the block."""
        call, update = nn.Module.__call__, torch.amp.GradScaler.update
        scale = torch.amp.GradScaler.scale
        backward, grad = torch.autograd.backward, torch.autograd.grad

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_inner() or not torch.is_grad_enabled() or not is_first_run():
                self._is_transformed |= is_transformed()
                return call(module, *args, **kwargs)
            self._judge_pending()
            watch = self._watch_of(module)
            watch.before(module, args, kwargs)
            with self._unwatched():
                output = call(module, *args, **kwargs)
            watch.after(module, args, output)
            return output

        def judged_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self._losses += [x.detach() for x in losses]
            self._judge_pending()
            self._read(losses)
            backward(tensors, *args, **kwargs)
            self._judge_backward(losses)

        def judged_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.steps and not self._backwards and not self._is_inner():
                self._read(tree_leaves(outputs))
            gradients = grad(outputs, *args, **kwargs)
            if not self._is_inner() and (is_transformed() or is_first_run()):
                self._judge_grad(_plain(outputs), _plain(gradients))
            return gradients

        def noted_scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            self._is_scaled |= scaler.is_enabled()
            return scale(scaler, outputs)

        def after_update(scaler: torch.amp.GradScaler, *args: Any) -> None:
            before = scaler.get_scale()
            update(scaler, *args)
            self._judge_overflow(before, scaler.get_scale())

        with (
            mock.patch.object(nn.Module, "__call__", watched),
            mock.patch.object(torch.autograd, "backward", judged_backward),
            mock.patch.object(torch.autograd, "grad", judged_grad),
            mock.patch.object(torch.amp.GradScaler, "scale", noted_scale),
            mock.patch.object(torch.amp.GradScaler, "update", after_update),
        ):
            hooks = [
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ]
            self._begin_scope()
            try:
                yield
                self._judge_pending()
            except (Exception, SystemExit) as end:
                self._pending = None
                if getattr(end, "code", FAILED) and not (self.bad and self.on_bad == "stop"):
                    self._judge_end()
                raise
            finally:
                self._scopes.close()
                weights = [p for model in self._watches for p in model.parameters()]
                given = {id(p) for p in weights if p.grad is not None}
                self._n_unheld = len(given - self._held_weights)
                self._watches.clear()
                for hook in hooks:
                    hook.remove()

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Watch no module that is called inside: a part of a model, or a pass that is repeated."""
        self._inside.a_model = True
        try:
            yield
        finally:
            self._inside.a_model = False

    def _is_inner(self) -> bool:
        return torch.compiler.is_compiling() or getattr(self._inside, "a_model", False)

    def summary(self) -> str:
        """Return one line: what was checked, what was not, and the number of bad steps."""
        line = f"{self.steps} optimizer steps" if self.steps else "no optimizer took a step"
        if self.bad:
            return f"{line}, not finite: {self.bad}"
        if not self.steps and not self._checked:
            return f"{line}; nothing was checked"
        if not self.steps:
            line += f"; {self._checked} gradient computations"
        if not self.steps and self._is_scaled:
            return f"{line}, no loss NaN; gradients, which are scaled, were not checked"
        unheld = f"; gradients of {self._n_unheld} weights that no optimizer holds were not checked"
        is_partial = self.steps and self._n_unheld
        return f"{line}, every loss and gradient finite{unheld if is_partial else ''}"

    def _watch_of(self, module: nn.Module) -> Watch:
        """Return the watch of a model, without the passes from before its last update."""
        if module not in self._watches:
            # Without hooks: a model that has them cannot be pickled.
            self._watches[module] = Watch(module, record=self.record, hooks=False)
        if module in self._stale:
            self._stale.remove(module)
            self._watches[module].forget()
            self._begin_scope()
        return self._watches[module]

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple | None:
        """Judge the gradients before a step, or each time that its closure has computed them."""
        if is_skipping(optimizer) or isinstance(optimizer, Iterable):  # steps others
            return None
        step, self._skips = self.steps, False

        def judge() -> None:
            self.steps = step  # of all calls of a closure
            self._skips = False
            if unscale_(optimizer):  # else the scaler's `update` is judged
                self._judge(optimizer)

        if optimizer not in self._others:
            self._others[optimizer] = skipping(optimizer, lambda: self._skips)
        return judged_first(self._others[optimizer], judge, args, kwargs)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not is_skipping(optimizer):
            give_back(self._withheld)

    def _judge(self, optimizer: Optimizer) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        if self._n_held.get(optimizer) != len(weights):
            self._n_held[optimizer] = len(weights)
            self._held_weights.update(map(id, weights))
        self._pending = None
        gradients = [p.grad for p in weights if p.grad is not None]
        bad = not are_finite([norm_of(gradients), *self._losses])
        if self.on_bad == "skip":  # on all ranks, or their weights would differ
            made = "python -m firstnan --on-bad skip"
            self._ranks = self._ranks or Agreement(None, weights[0].device, made)
            flags = self._ranks.exchange(f"step {self.steps + 1}", torch.tensor([float(bad)]))
            bad = bool(flags.any())
        step, self.steps = self.steps, self.steps + 1
        try:
            if bad and self._bad_passes:
                self.bad += 1 - self._bad_passes
            elif bad:
                self._report(step, [*self._losses, *gradients], note=_zero_eps(optimizer))
        finally:
            self._bad_passes = 0
            self._forget(weights)
        if bad and self.on_bad == "skip":
            self._skips = True
            self._withheld = withhold(weights)

    def _judge_end(self) -> None:
        """Report a bad step that a check of the script itself ended before the optimizer's."""
        fresh = [watch for model, watch in self._watches.items() if model not in self._stale]
        with self._unwatched():
            found = first_finding(fresh, self.steps)
        if not are_finite(self._losses) or (found and found[0].module):
            with contextlib.suppress(SystemExit):  # the script's own end stays
                self._report(self.steps, self._losses, ", ended by the script")

    def _read(self, losses: Sequence[Tensor]) -> None:
        """Look for the operation that made a loss bad, where that costs no wait for the device."""
        if (
            self._scope is None and self.bad < _REPORTS
        ):  # the first step waits anyway, and a run that was bad may
            waits = not self.steps or self.bad > 0
            self._origin.read(losses, self._watches.values(), waits=waits)

    def _judge_backward(self, losses: list[Tensor]) -> None:
        """Check a backward pass while no optimizer takes a step: the script may update itself."""
        number, self._backwards = self._backwards, self._backwards + 1
        if self.steps or not is_first_run():
            return
        self._checked = self._backwards
        gradients = [] if self._is_scaled else self._gradients(losses)
        if not _has_nan(self._losses) and are_finite(gradients):
            self._bad_passes = 0
            if not self._is_scaled:
                self._stale.update(self._watches)
        else:
            place, bad = f", backward pass {number + 1}", [*self._losses, *gradients]
            located = self._locate(0, bad)  # now: the script may go on to spoil the weights
            self._pending = partial(self._report_pass, bad, place, located)
        if number:
            self._judge_pending()
            self._losses = [x for x in self._losses if x.isinf().any()]  # for the first step
            if not self._losses:
                self._origin.forget()

    def _gradients(self, losses: list[Tensor]) -> list[Tensor]:
        """Return the gradients that losses left behind, at weights of watched models and others."""
        ends = [node for node in nodes(losses) if type(node).__name__ == "AccumulateGrad"]
        weights = {id(node.variable): node.variable for node in ends}
        # Reentrant checkpointing hides them from the loss.
        weights |= {id(p): p for model in self._watches for p in model.parameters()}
        return [p.grad for p in weights.values() if p.grad is not None]

    def _report_pass(
        self, bad: list[Tensor], place: str, located: tuple[Finding, Watch | None]
    ) -> None:
        """Report a bad backward pass, unless the one before was: gradients add up."""
        self._bad_passes += 1
        if self._bad_passes > 1:
            self.bad += 1
        else:
            self._report(0, bad, place, located=located)

    def _judge_pending(self) -> None:
        """Report a bad backward pass: what follows it is no step of an optimizer."""
        report, self._pending = self._pending, None
        if report is not None:
            report()

    def _judge_grad(self, losses: list[Tensor], gradients: list[Tensor]) -> None:
        """Check a call of autograd.grad before the first `backward` or step, if there is any."""
        if self.steps or self._backwards or not losses:
            return
        number, self._checked = self._checked, self._checked + 1
        # The first gradient may belong to a penalty, at a loss scale that is still too large.
        if _has_nan([*losses, *gradients] if number else losses):
            self._report(0, [*losses, *gradients], f", call {number + 1} of autograd.grad")
        self._origin.forget()

    def _judge_overflow(self, before: float, after: float) -> None:
        """Check a step that a GradScaler skipped, so that the optimizer's hook did not run."""
        self._overflows = self._overflows + 1 if after < before else 0
        if not self._overflows:
            return
        if _has_nan(self._losses) or self._overflows == _OVERFLOWS or after <= 1:
            self._report(self.steps, self._losses, f", skipped at a loss scale of {before:g}")
        self._forget()

    def _report(
        self,
        step: int,
        bad: list[Tensor],
        place: str = "",
        note: str = "",
        located: tuple[Finding, Watch | None] | None = None,
    ) -> None:
        """Locate and report a fault, then stop the script if it should not go on."""
        self.bad += 1
        if self.bad <= _REPORTS:
            finding, watch = located or self._locate(step, bad)
            if note and finding.fault and (finding.fault.poisoned or "").startswith("weight"):
                finding = replace(finding, note=note)
            text = f"step {step + 1}{place}:\n{finding}"
            if self.bundle is not None and watch is not None:
                rank = "" if finding.rank is None else f"-rank{finding.rank}"
                path = self.bundle / f"step{step + 1}{rank}.safetensors"
                with self._unwatched():
                    text += f"\nbundle     {save(path, watch, finding)}"
            self.report(text)
        if self.on_bad == "stop":
            raise SystemExit(GUARD_STOPPED)
        if self.bad == _REPORTS:
            self.report("further bad steps are counted, but not reported")

    def _locate(self, step: int, bad: list[Tensor]) -> tuple[Finding, Watch | None]:
        """Return the first bad operation, and the watch of its model."""
        seen = None if self._scope is None else self._scope.fault(*bad)
        with self._unwatched():
            found = first_finding(self._watches.values(), step + 1, self._losses)
        first, watch = found or (None, None)
        known = first and first.fault and (first.fault.op, first.fault.backward)
        if seen is not None and known != (seen.op, seen.backward):
            return Finding(None, seen, is_outside=True), None
        is_elsewhere = first is None or first.note == FINITE_AGAIN
        if several_ranks() and is_elsewhere and are_finite(self._losses):
            note = "finite on this rank; see the reports of the others"
            return Finding(None, note=note), None
        first = self._origin.better(first, watch)
        first = first or self._nothing_found()
        is_named = first.fault is not None and OUTSIDE not in (first.fault.poisoned or "")
        if self._scope is not None or (is_named and first.module):
            return first, watch
        note = f"{first.note}; " if first.note else ""
        what = "the line" if is_named else "the operation"
        return replace(first, note=f"{note}--every-op names {what}, but is slow"), watch

    def _nothing_found(self) -> Finding:
        if any(watch.calls for watch in self._watches.values()):
            return Finding(None, note="the models' own numbers are finite", is_outside=True)
        if self._is_transformed:
            return Finding(None, note="models that torch.func calls are not followed")
        return Finding(None, note="no model was called", is_outside=True)

    def _forget(self, weights: list[Tensor] | None = None) -> None:
        """Forget the step of the models that own one of the weights; of all models without them."""
        self._losses.clear()
        self._origin.forget()
        updated = {id(p) for p in weights or ()}
        for model in self._watches:
            first = next((p for p in model.parameters() if p.requires_grad), None)
            if weights is None or first is None or id(first) in updated:
                self._stale.add(model)  # forgotten when called again: other optimizers may follow
        if not self._watches:
            self._begin_scope()

    def _begin_scope(self) -> None:
        self._scopes.close()  # how a tensor was made matters only within its step
        if self.every_op:
            self._scope = self._scopes.enter_context(Microscope())


def _plain(values: object) -> list[Tensor]:
    """Return the tensors with values of their own, without what torch.func wraps around them."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    plain = [x.detach() for x in tree_leaves(values) if type(x) in (Tensor, nn.Parameter)]
    for i, x in enumerate(plain):
        while functorch.is_functorch_wrapped_tensor(x):
            x = plain[i] = functorch.get_unwrapped(x)
    return plain


def _has_nan(tensors: Sequence[Tensor]) -> bool:
    return any(bool(as_reals(x).isnan().any()) for x in tensors)


def _zero_eps(optimizer: Optimizer) -> str:
    """Return a sentence if the eps of the optimizer is 0 in the precision of a weight."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float) or eps <= 0:
            continue
        for p in group["params"]:
            if not torch.tensor(eps, dtype=p.dtype):
                zero = f"the optimizer's eps={eps:g} is 0 in {str(p.dtype).removeprefix('torch.')}"
                return f"{zero}: a weight whose gradient was 0 became 0 / 0; keep it in float32"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script, report its steps that are not finite, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m firstnan",
        description="Run a PyTorch training script unchanged; at the first step whose loss or "
        "gradient is not finite, name the operation that made it so, its inputs and the cause.",
        epilog="Other commands, each with --help: replay BUNDLE (a saved bad step), record FOLDER "
        "SCRIPT and diff FOLDER FOLDER (the first operation at which two runs differ); --version.",
    )
    add = parser.add_argument
    ways = "end the script with exit code 3, leave the step out, or only report (default: stop)"
    add("--on-bad", choices=("stop", "skip", "go-on"), default="stop", help=ways)
    add("--record", action="store_true", help="keep each module's ranges, for steps that differ")
    add(
        "--every-op",
        action="store_true",
        help="find every operation outside of models, and its line; slow",
    )
    add("--bundle", type=Path, metavar="FOLDER", help="save what replays a bad step elsewhere")
    add("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    add("script", help="the script to run")
    add("rest", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    options = parser.parse_args(arguments)
    try:
        if options.bundle is not None:
            library()
        check_script(options.script, options.module)
    except UserError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    watch = ScriptWatch(
        options.on_bad,
        record=options.record,
        every_op=options.every_op,
        bundle=options.bundle,
        report=lambda text: print(f"\n{text}\n", file=sys.stderr, flush=True),
    )
    try:
        code = run(options.script, options.rest, options.module, watch.watching())
    finally:
        print(f"guard: {watch.summary()}", file=sys.stderr)
    caught = watch.bad > 0 and options.on_bad == "stop"  # by a bare `except` of the script
    return GUARD_STOPPED if caught else code


def check_script(script: str, is_module: bool) -> None:
    """Raise UserError if a script is not a file."""
    if not is_module and not Path(script).is_file():
        what = f"script is {script}, which is not a file"
        raise UserError(f"{what}; expected a Python script, or -m MODULE")


def run(
    script: str, rest: Sequence[str], is_module: bool, inside: AbstractContextManager[object]
) -> int:
    """Run a script with its own arguments inside a context; return its exit code."""
    sys.argv = [script, *rest]
    sys.path[0] = "" if is_module else str(Path(script).resolve().parent)
    code: object = OK
    try:
        with inside:
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        code = OK if stop.code is None else stop.code
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return FAILED
