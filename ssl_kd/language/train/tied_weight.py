"""Add up the gradient of a weight that is both the input embedding and the output head.

Autograd would first compute both gradients, `[vocab, dim]` each, and then add them. With a large
vocabulary they take more memory than anything else in a step: 640 MiB each for the 262,144 x 640 of
Gemma 3 270M. Here the gradient of the few embeddings that a batch uses is added to that of the
head, in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode


class TiedGradient:
    """The gradient of a tied weight in one forward and backward pass.

    The head's backward pass, which comes first, calls `add`; that of the embedding adds its own
    part and returns the total to autograd.
    """

    def __init__(self) -> None:
        self.is_looked_up = False  # with a gradient, so that autograd will ask for the total
        self.total: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add a gradient `[vocab, dim]`, which is not copied and may be changed later."""
        self.total = gradient if self.total is None else self.total.add_(gradient)

    def check(self) -> None:
        """Raise RuntimeError if a backward pass did not reach the embedding."""
        if self.total is not None:
            raise RuntimeError(
                "the gradient of the output head was not passed on, because the hidden states do "
                "not depend on the input embedding, with which it shares its weight: untie them "
                "(tie_word_embeddings=False in the student's config.json)"
            )


@contextmanager
def tied_lookups(embedding: nn.Module, weight: Tensor, gradient: TiedGradient) -> Iterator[None]:
    """Within this context, look-ups in `weight` pass their gradient to `gradient`.

    Args:
        embedding: the module that looks rows up; one with another weight is left alone.
        weight: weight of the output head, `[vocab, dim]`.
        gradient: the gradient of this pass.
    """
    if getattr(embedding, "weight", None) is not weight:
        yield
        return
    mode = _Lookups(weight, gradient)

    def enter(*_: Any) -> None:
        mode.__enter__()

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)

    # Only while the embedding runs: the mode is a line of Python between all operations and their
    # callers, and a fault is reported at the innermost line.
    hooks = [
        embedding.register_forward_pre_hook(enter),
        embedding.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Lookups(TorchFunctionMode):
    def __init__(self, weight: Tensor, gradient: TiedGradient) -> None:
        super().__init__()
        self.weight, self.gradient = weight, gradient

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_plain = not any(map(kwargs.get, ("max_norm", "scale_grad_by_freq", "sparse")))
        if (
            function is F.embedding
            and args[1] is self.weight
            and is_plain
            and self.weight.requires_grad
            and torch.is_grad_enabled()
        ):
            self.gradient.is_looked_up = True
            ignored = kwargs.get("padding_idx")
            return _Lookup.apply(args[0], self.weight, self.gradient, ignored)
        return function(*args, **kwargs)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, gradient: TiedGradient, ignored: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.gradient, ctx.ignored = gradient, ignored
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> Any:
        ids, weight = ctx.saved_tensors
        ids = ids.flatten()
        total, ctx.gradient.total = ctx.gradient.total, None
        if total is None:  # the head has no part in this loss
            total = torch.zeros_like(weight)
        rows = incoming.flatten(0, -2).to(total.dtype)
        if ctx.ignored is not None:
            rows = rows.masked_fill((ids == ctx.ignored).unsqueeze(-1), 0.0)
        # Both add equal ids in a fixed order.
        if total.device.type == "cpu":
            total.index_add_(0, ids, rows)
        else:
            total.index_put_((ids,), rows, accumulate=True)
        return None, total, None, None
