"""Check an objective of a user on a few random logits, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.core.seeds import drawing
from ssl_kd.core.settings.import_paths import explain
from ssl_kd.vision.train.objectives.base import Objective

_HEADS = 2
_VIEWS = 2
_BATCH = 8


def check_objective(name: str, objective: Objective, n_clusters: int) -> None:
    """Check what an objective returns: shapes, dtype, gradient, and that it does not mix heads.

    Args:
        name: the import path in the setting LOSS, for messages.
        objective: the objective.
        n_clusters: number of clusters K of the run.

    Raises:
        InputError: names the method, what it returned, what was expected and the way out.
    """
    with drawing(0):
        teacher, student = torch.randn(2, _HEADS, _VIEWS, _BATCH, n_clusters) / 4
    first = _call(name, "initial_marginal", lambda: float(objective.initial_marginal(n_clusters)))
    marginal = torch.full((_HEADS, n_clusters), first)
    targets = _targets(name, objective, teacher, marginal)
    log_targets = _call(name, "log_probabilities", lambda: objective.log_probabilities(targets))
    _check_tensor(name, "log_probabilities", log_targets, teacher.shape, "one for each target")
    healthy = _loss(name, objective, student, targets, marginal, None)
    if not all(value.isfinite().all() for value in healthy):
        raise InputError(
            f"LOSS {name}: on random logits between -1 and 1 its loss or gradient is not finite "
            f"(loss {healthy[0].tolist()}): compute in log space, for example with "
            "ssl_kd.losses.log_probabilities"
        )
    _loss(name, objective, student, targets, marginal, torch.full((1, _BATCH), 1 / _BATCH))

    teacher, student = teacher.clone(), student.clone()
    teacher[1] = student[1] = torch.nan
    targets = _targets(name, objective, teacher, marginal)
    with_sick = _loss(name, objective, student, targets, marginal, None)
    if not all(torch.equal(a[0], b[0]) for a, b in zip(healthy, with_sick, strict=True)):
        raise InputError(
            f"LOSS {name}: a NaN in one head changes the loss or the gradient of another. Each row "
            "of a tensor is one head: average over views, samples and clusters, not over the first "
            "dimension"
        )


def _targets(name: str, objective: Objective, logits: Tensor, marginal: Tensor) -> Tensor:
    answer = _call(name, "targets", lambda: objective.targets(logits, marginal))
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise InputError(
            f"LOSS {name}: targets returned {_kind(answer)}, expected a tuple of two tensors, the "
            "targets and the marginal of the batch"
        )
    targets, of_batch = answer
    _check_tensor(name, "targets", targets, logits.shape, "the targets, of the shape of logits")
    _check_tensor(name, "targets", of_batch, marginal.shape, "the marginal, [head, cluster]")
    return targets


def _loss(
    name: str,
    objective: Objective,
    logits: Tensor,
    targets: Tensor,
    marginal: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss `[head]` and its gradient with respect to the logits."""
    logits = logits.detach().requires_grad_()

    def loss() -> Tensor:
        with torch.enable_grad():
            return objective.loss(logits, targets, marginal, weights)

    values = _call(name, "loss", loss)
    _check_tensor(name, "loss", values, (_HEADS,), "one loss for each head")
    if not values.requires_grad:
        raise InputError(
            f"LOSS {name}: loss returned values without a gradient: remove detach, no_grad or "
            "argmax"
        )
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    return values.detach(), gradient


def _check_tensor(
    name: str, method: str, answer: object, shape: tuple[int, ...], about: str
) -> None:
    expected = f"expected a float32 tensor {list(shape)}, {about}"
    if not isinstance(answer, Tensor) or answer.shape != shape or answer.dtype != torch.float32:
        raise InputError(
            f"LOSS {name}: {method} returned {_kind(answer)}, {expected} (here {_HEADS} heads, "
            f"{_VIEWS} views, {_BATCH} samples, {shape[-1] if len(shape) > 1 else 'K'} clusters)"
        )


def _kind(answer: object) -> str:
    if isinstance(answer, Tensor):
        return f"a {str(answer.dtype).removeprefix('torch.')} tensor {list(answer.shape)}"
    return f"a {type(answer).__name__}"


def _call(name: str, method: str, function: Callable[[], Any]) -> Any:
    """Call a user's method; explain what it raises."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise InputError(f"LOSS {name}: {method} fails: {explain(error)}") from error
