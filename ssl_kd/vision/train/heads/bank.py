"""Run many heads at once: each head's weights are a row of a matrix, products are batched."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.dropout import _DropoutNd

from ssl_kd.core.errors import InputError
from ssl_kd.core.memory import is_out_of_memory
from ssl_kd.core.seeds import drawing, seeded
from ssl_kd.core.settings.import_paths import explain, import_class

logger = logging.getLogger(__name__)

OWN_HEADS = (
    "ssl_kd.heads.TEMIHead",
    "ssl_kd.vision.train.heads.temi.TEMIHead",
    "ssl_kd.heads.DINOHead",
    "ssl_kd.vision.train.heads.dino.DINOHead",
)
"""Import paths of the heads that are part of this library."""


class HeadBank:
    """Evaluate `n_heads` independent copies of one head architecture in one batch.

    The output of head `i` does not depend on the other heads. The bank has no weights: they are
    passed as a matrix `[head, parameter]`, so that student, EMA teacher and optimizer state are one
    matrix each. If the head class has a static method `stacked(parameters, x)`, this is the batched
    forward pass; otherwise `torch.vmap` batches `forward`.

    Args:
        make_head: function that builds one head. The bank restores the random state afterwards.
        n_heads: number of heads H.
        first: number of the bank's first head; above 0 if other processes run the heads before it.

    Attributes:
        draws: whether a forward pass in training draws random numbers (dropout).

    Raises:
        ValueError: the head has buffers (batch statistics would leak between heads), no parameters,
            or frozen parameters.
    """

    def __init__(self, make_head: Callable[[], nn.Module], n_heads: int, first: int = 0) -> None:
        self.make_head = make_head
        self.n_heads, self.first = n_heads, first
        with drawing():
            self._template = make_head().to("meta")
        head = type(self._template).__name__
        if any(True for _ in self._template.buffers()):
            raise InputError(
                f"{head} has buffers, as batch normalization does; expected parameters only: use "
                "LayerNorm or GroupNorm instead"
            )
        half = {p.dtype for p in self._template.parameters()} & {torch.float16, torch.bfloat16}
        if half:
            short = ", ".join(
                sorted(str(d).removeprefix("torch.").replace("float", "fp") for d in half)
            )
            logger.warning("%s has %s weights; training converts them to fp32", head, short)
        self._shapes = {name: p.shape for name, p in self._template.named_parameters()}
        if not self._shapes:
            raise InputError(f"{head} has no parameters; expected some to train")
        if frozen := [n for n, p in self._template.named_parameters() if not p.requires_grad]:
            raise InputError(
                f"{head} has frozen parameters ({', '.join(frozen)}); expected requires_grad=True "
                "for all: unfreeze them, or compute constants in forward"
            )
        self.n_parameters = sum(math.prod(shape) for shape in self._shapes.values())
        self.draws = any(isinstance(m, _DropoutNd) for m in self._template.modules())
        # Approximate activations per sample, which decide how many heads fit into the cache.
        self.width = sum(shape[0] for shape in self._shapes.values() if len(shape) > 1)

    def initial_weights(self, seed: int) -> Tensor:
        """Return initial weights `[head, parameter]` float32, the same for the same seed."""
        heads = range(self.first, self.first + self.n_heads)
        return torch.stack([self.new_row(seed * 100_003 + i) for i in heads])

    def new_row(self, seed: int) -> Tensor:
        """Return initial weights `[parameter]` float32 of one head, which depend on `seed` only."""
        with drawing(seed):
            row = self.flatten(self.make_head())
        if not torch.isfinite(row).all():
            name = type(self._template).__name__
            raise InputError(
                f"{name} has initial weights that are not finite; expected finite numbers: "
                "initialize all parameters in __init__"
            )
        return row

    def draws_seeded(self, seed: int) -> AbstractContextManager[Any]:
        """Return a context that seeds dropout and restores the global random state at its end.

        On a GPU, other threads must not draw random numbers inside this context.
        """
        if not self.draws:
            return contextlib.nullcontext()
        if torch.cuda.is_initialized():
            return seeded(seed, [torch.cuda.current_device()])
        return drawing(seed)

    def flatten(self, head: nn.Module) -> Tensor:
        """Return one head's parameters as a row `[parameter]` float32."""
        return torch.cat([p.detach().float().flatten() for p in head.parameters()])

    def head(self, weights: Tensor, i: int) -> nn.Module:
        """Return head `i` as a separate module, with row `i` of `weights` `[head, parameter]`."""
        with drawing():
            module = self.make_head()
        parameters = self.unflatten(weights[i : i + 1].detach().cpu())
        module.load_state_dict({name: value[0] for name, value in parameters.items()})
        return module

    def unflatten(self, weights: Tensor) -> dict[str, Tensor]:
        """Return views of rows `[head, parameter]` as named, stacked parameters `[head, ...]`."""
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        pieces = weights.split(sizes, dim=1)
        named = zip(self._shapes.items(), pieces, strict=True)
        return {name: piece.unflatten(1, shape) for (name, shape), piece in named}

    def decay_mask(self) -> Tensor:
        """Return `[parameter]`, 1 where weight decay applies (matrices), 0 for others."""
        return torch.cat(
            [torch.full((math.prod(s),), float(len(s) > 1)) for s in self._shapes.values()]
        )

    def __call__(
        self, parameters: dict[str, Tensor], x: Tensor, *, training: bool = False
    ) -> Tensor:
        """Compute logits `[head, batch, K]` from stacked parameters and embeddings `[batch, dim]`.

        With `training`, dropout is active and draws from torch's global generator.
        """
        self._template.train(training)
        stacked = getattr(self._template, "stacked", None)
        if stacked is not None:
            return stacked(parameters, x)

        def one(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self._template, parameters, (x,))

        return vmap(one, in_dims=(0, None), randomness="different")(parameters, x)


def head_maker(path: str, in_dim: int, n_clusters: int, **options: int) -> Callable[[], nn.Module]:
    """Return a function that builds a head `Class(in_dim, n_clusters)` from its import path.

    `options` are layer widths; those that the head's constructor accepts are passed to it.
    """
    head = import_head(path)
    widths = {k: width for k, width in options.items() if k in inspect.signature(head).parameters}
    return functools.partial(_build, path, head, in_dim, n_clusters, **widths)  # can be pickled


def _build(path: str, head: type[nn.Module], dim: int, n_clusters: int, **widths: int) -> Any:
    try:
        return head(dim, n_clusters, **widths)
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        more = "".join(f", {name}={width}" for name, width in widths.items())
        raise InputError(
            f"head {path!r} cannot be built by {head.__name__}({dim}, {n_clusters}{more}); "
            f"expected a constructor (in_dim, n_clusters): {explain(error)}"
        ) from error


def check_answer(bank: HeadBank, weights: Tensor, in_dim: int, n_clusters: int) -> None:
    """Check that a bank's heads map embeddings to one differentiable logit per cluster."""
    name, expected = type(bank._template).__name__, (1, 2, n_clusters)
    x = torch.zeros(2, in_dim, device=weights.device)
    rows = {n: p.detach().requires_grad_() for n, p in bank.unflatten(weights[:1]).items()}
    try:
        with drawing(), torch.enable_grad():
            answer = bank(rows, x)
            if wrong := _wrong_answer(answer, expected):
                raise InputError(f"{name} turns embeddings [2, {in_dim}] into {wrong}")
            torch.autograd.grad(answer.sum(), list(rows.values()), materialize_grads=True)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"{name} fails on embeddings [2, {in_dim}]: {explain(error)}") from error


def _wrong_answer(answer: object, expected: tuple[int, ...]) -> str:
    """Describe what is wrong with an output that should be logits of this shape; "" if nothing."""
    logits = f"logits [batch, n_clusters], here {list(expected[1:])}"
    if not isinstance(answer, Tensor):
        return f"a {type(answer).__name__}, expected one tensor of {logits}"
    if tuple(answer.shape) != expected:
        return f"{list(answer.shape[1:])}, expected {logits}"
    if answer.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{answer.dtype}, expected torch.float32: end its forward with .float()"
    if not answer.requires_grad:
        return (
            "logits without a gradient, which cannot be trained: remove detach, no_grad or argmax "
            "from its forward"
        )
    return ""


def parameters_of(make_head: Callable[[], nn.Module]) -> int | None:
    """Return the number of parameters of one head, without allocating them; None if unknown."""
    try:
        with drawing(), torch.device("meta"):
            return sum(p.numel() for p in make_head().parameters())
    except InputError:  # a head whose __init__ reads its weights
        return None


def import_head(path: str) -> type[nn.Module]:
    """Import a head class by its path, such as `heads.cosine_head.CosineHead`."""
    return import_class(path, nn.Module, "head")
