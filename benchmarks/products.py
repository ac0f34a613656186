"""What the precision of the heads' products is worth: float32, TF32 and bfloat16 on digits.

    python -m benchmarks.products --seeds 3

48 heads that find the clusters themselves (METHOD heads), on scikit-learn's first 1,437 digits.
TF32 is emulated, so that it can be measured without a GPU: what goes into a product of the training
step, forward and backward, is rounded to 10 bits of mantissa, as the tensor cores do; products and
sums are float32. Accuracy and NMI in percent; labels are read for these alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ssl_kd import MultiHeadClusterer, evaluate
from ssl_kd.vision.step import HeadTrainer

_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}


def rounded(x: Tensor) -> Tensor:
    """float32 with 10 bits of mantissa, the nearest, ties away from 0."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class TF32(TorchDispatchMode):
    """Inside, what goes into a product of float32 is rounded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and args[-1].dtype == torch.float32:
            *added, a, b = args  # a bias is added in float32
            args = (*added, *tree_map_only(Tensor, rounded, (a, b)))
        return func(*args, **(kwargs or {}))


def emulated(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step with its products in TF32."""

    def in_tf32(*args: Any, **kwargs: Any) -> Any:
        with TF32():
            return step(*args, **kwargs)

    return in_tf32


def main() -> None:
    """Print a row for each kind of products."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--heads", type=int, default=48)
    args = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x, y = x[:1437], y[:1437]
    exact = HeadTrainer.step
    print("| products | ACC | NMI | ACC of each seed |\n|---|---|---|---|", flush=True)
    for name, half in (("float32", False), ("TF32, emulated", False), ("bfloat16", True)):
        HeadTrainer.step = emulated(exact) if "TF32" in name else exact
        scores = []
        for seed in range(args.seeds):
            clusterer = MultiHeadClusterer(
                10, method="heads", n_heads=args.heads, random_state=seed, use_fp16=half
            )
            found = clusterer.fit(x).labels_
            scores.append(evaluate.clustering_scores(y, found))
        acc, nmi = ([100 * (score[kind] or 0.0) for score in scores] for kind in ("acc", "nmi"))
        each = ", ".join(f"{value:.1f}" for value in acc)
        print(
            f"| {name} | {statistics.mean(acc):.1f} | {statistics.mean(nmi):.1f} | {each} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
