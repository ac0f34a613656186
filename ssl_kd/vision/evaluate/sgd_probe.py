"""Evaluate frozen embeddings by the linear probe of DINOv2: SGD over a grid of learning rates.

All classifiers of the grid see the same batches, so one product of matrices computes the logits of
all: the weights are `[d, rate, class]`. The gradient of the cross-entropy is written out, and the
update is that of `torch.optim.SGD` with momentum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.vision.evaluate.probe import probe_parts, stratified_split

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
BATCH_SIZE = 128
STEPS = 12_500  # ten "epochs" of 1,250 batches
MOMENTUM = 0.9
SCALE = 0.01  # deviation of the first weights
ROWS_PER_BLOCK = 4096


def sgd_probe(
    train_x: NDArray,
    train_y: NDArray,
    test_x: NDArray | None = None,
    test_y: NDArray | None = None,
    *,
    rates: Sequence[float] = RATES,
    steps: int = STEPS,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Compute the accuracy of linear classifiers trained by SGD, as DINOv2 does.

    A linear layer for each learning rate is trained on the embeddings as they are: cross-entropy,
    SGD with momentum 0.9, no weight decay, cosine schedule to 0. DINOv2 chooses the rate by the
    accuracy that it reports, which is too high; here a rate is chosen on a fifth of the training
    data, by classifiers that are trained on the rest. Both numbers are returned. Other differences:
    DINOv2 trains on random crops, of which a cache has none, and draws the first weights of each
    classifier anew.

    Args:
        train_x: `[n, d]` embeddings.
        train_y: `[n]` integer labels; samples with label -1 (unknown) are left out.
        test_x: `[m, d]` held-out embeddings; None: a quarter of the training data is held out.
        test_y: `[m]` labels of the held-out embeddings.
        rates: Learning rates for a batch of 256, positive; they are scaled by `batch_size` / 256.
        steps: Updates of each classifier, at least 1.
        batch_size: Samples of a batch, at least 1.
        seed: Seed of splits, first weights and batches.
        device: Device that trains.

    Returns:
        A dict: `accuracy` in [0, 1] of the chosen rate, trained on all training rows; `rate`, the
        chosen one, and its `validation` accuracy; `as_dinov2`, the highest accuracy of all rates;
        `rates`, a list of dicts with `rate`, `validation` and `accuracy` (None where the classifier
        diverged); `rows`, `steps`, `batch_size`, `epochs`; and `note`, one sentence on deviations,
        or None. Accuracies are None without a probe, and `note` says why.

    References:
        Oquab et al., DINOv2: Learning Robust Visual Features without Supervision, 2023; the
        constants are those of its code, `dinov2/eval/linear.py`.
    """
    if steps < 1 or batch_size < 1 or not rates or not min(rates) > 0:
        raise ValueError(
            f"steps is {steps}, batch_size {batch_size} and rates {list(rates)}; expected steps "
            "and batch_size of at least 1 and positive rates"
        )
    parts = probe_parts(train_x, train_y, test_x, test_y, max_rows=len(train_y), seed=seed)
    about = {
        "rows": parts.rows,
        "steps": steps,
        "batch_size": batch_size,
        "epochs": steps * batch_size / max(parts.rows, 1),
    }
    if parts.problem is not None:
        nothing = dict.fromkeys(("accuracy", "rate", "validation", "as_dinov2")) | {"rates": []}
        return nothing | about | {"note": parts.problem}
    classes, codes = np.unique(parts.y, return_inverse=True)
    # A class that is not trained on is none of the classifier's: it is always wrong.
    held_codes = np.searchsorted(classes, parts.held_y).clip(max=len(classes) - 1)
    held_codes = np.where(classes[held_codes] == parts.held_y, held_codes, -1)

    def accuracies(x: NDArray, y: NDArray, on_x: NDArray, on_y: NDArray) -> list[float | None]:
        weights, bias = train_linear(
            torch.from_numpy(x).to(device),
            torch.from_numpy(y).to(device),
            len(classes),
            [rate * batch_size / 256 for rate in rates],
            steps=steps,
            batch_size=batch_size,
            seed=seed,
        )
        return _accuracies(weights, bias, torch.from_numpy(on_x), torch.from_numpy(on_y))

    fit_x, choose_x, fit_y, choose_y = stratified_split(parts.x, codes, 0.2, seed)
    validation = accuracies(fit_x, fit_y, choose_x, choose_y)
    tested = accuracies(parts.x, codes, parts.held_x, held_codes)
    rows = [
        {"rate": rate, "validation": first, "accuracy": second}
        for rate, first, second in zip(rates, validation, tested, strict=True)
    ]
    usable = [row for row in rows if None not in row.values()]
    notes = [*parts.notes]
    if len(usable) < len(rows):
        notes.append(f"{len(rows) - len(usable)} of {len(rows)} rates diverged")
    best = max(usable, key=lambda row: row["validation"], default=None)
    return {
        "accuracy": None if best is None else best["accuracy"],
        "rate": None if best is None else best["rate"],
        "validation": None if best is None else best["validation"],
        "as_dinov2": max((row["accuracy"] for row in usable), default=None),
        "rates": rows,
        **about,
        "note": "; ".join(notes) or None,
    }


@torch.no_grad()
def train_linear(
    x: Tensor,
    y: Tensor,
    n_classes: int,
    rates: Sequence[float],
    *,
    steps: int,
    batch_size: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Train a linear classifier for each learning rate on the same batches.

    Args:
        x: float32 `[n, d]`.
        y: int64 `[n]`, from 0.
        n_classes: Number of classes C.
        rates: The R learning rates at the first step.
        steps: Number of updates.
        batch_size: Samples of a batch; all samples are seen once before one is seen again.
        seed: Seed of the first weights and of the batches.

    Returns:
        Weights `[d, R, C]` and biases `[R, C]`.
    """
    random = torch.Generator().manual_seed(seed)
    n, d = x.shape
    first = SCALE * torch.randn(d, 1, n_classes, generator=random)
    weights = first.expand(-1, len(rates), -1).flatten(1).contiguous().to(x.device)
    bias = torch.zeros(weights.shape[1], device=x.device)
    rate = torch.tensor(rates, device=x.device).repeat_interleave(n_classes)
    momenta = [torch.zeros_like(weights), torch.zeros_like(bias)]
    rounds = math.ceil(steps * batch_size / n)
    order = torch.cat([torch.randperm(n, generator=random) for _ in range(rounds)]).to(x.device)
    for step in range(steps):
        rows = order[step * batch_size : (step + 1) * batch_size]
        batch = x[rows]
        logits = torch.addmm(bias, batch, weights).unflatten(1, (len(rates), n_classes))
        error = logits.softmax(-1)
        error[torch.arange(len(rows)), :, y[rows]] -= 1
        error = error.flatten(1) / len(rows)
        now = rate * (1 + math.cos(math.pi * step / steps)) / 2
        for parameter, momentum, gradient in zip(
            (weights, bias), momenta, (batch.T @ error, error.sum(0)), strict=True
        ):
            momentum.mul_(MOMENTUM).add_(gradient)
            parameter.sub_(now * momentum)
    return weights.unflatten(1, (len(rates), n_classes)), bias.unflatten(0, (len(rates), -1))


def _accuracies(weights: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> list[float | None]:
    """Return the accuracy of each classifier; None where a weight is not finite."""
    right = torch.zeros(len(bias), dtype=torch.int64)
    for block, labels in zip(x.split(ROWS_PER_BLOCK), y.split(ROWS_PER_BLOCK), strict=True):
        logits = torch.einsum("nd,drc->nrc", block.to(weights.device), weights) + bias
        right += (logits.argmax(-1).cpu() == labels[:, None]).sum(0)
    finite = weights.isfinite().all(2).all(0) & bias.isfinite().all(1)
    return [
        count / len(y) if healthy else None
        for count, healthy in zip(right.tolist(), finite.tolist(), strict=True)
    ]
