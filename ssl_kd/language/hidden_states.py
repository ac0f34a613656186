"""A loss term by what the layers of student and teacher put out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard.seeds import seeded
from ssl_kd.language.aligned import HiddenProjection
from ssl_kd.losses.features import state_distance
from ssl_kd.losses.rows import saturated
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import without_adapters
from ssl_kd.teachers.layers import decoder_layers


def layer_map(spec: str, student_depth: int, teacher_depth: int) -> list[tuple[int, int]]:
    """The pairs of layers that LAYER_MAP means for models of these depths.

    Args:
        spec: `last`; `uniform`, each layer of the student by the last of an equal share of the
            teacher's; or pairs `STUDENT:TEACHER`, from 0, separated by commas.
        student_depth: layers of the student.
        teacher_depth: layers of the teacher.

    Raises:
        SettingsError: a pair names a layer that is not there.

    References:
        `uniform`: TinyBERT, arXiv 1909.10351, section 4.1.

    >>> layer_map("uniform", 2, 6), layer_map("last", 2, 6), layer_map("0:1,1:3", 2, 6)
    ([(0, 2), (1, 5)], [(1, 5)], [(0, 1), (1, 3)])
    """
    if spec == "last":
        return [(student_depth - 1, teacher_depth - 1)]
    if spec == "uniform":
        share = teacher_depth / student_depth
        return [(i, max(0, round((i + 1) * share) - 1)) for i in range(student_depth)]
    pairs = [tuple(map(int, pair.split(":"))) for pair in spec.split(",")]
    depths = {"student": student_depth, "teacher": teacher_depth}
    for pair in pairs:
        for layer, (who, depth) in zip(pair, depths.items(), strict=True):
            if layer >= depth:
                raise SettingsError(
                    f"LAYER_MAP is {spec!r}, but the {who} has {depth} layers: name layers of it "
                    f"from 0 to {depth - 1}"
                )
    return [(s, t) for s, t in pairs]


class HiddenStates:
    """`hidden`: `state_distance` of what paired layers put out, mean over the pairs.

    Looks at the forward passes that there are anyway, by hooks. Where the widths differ, the
    student's states are projected to the teacher's width, by a linear map of each pair that learns
    with the student: the target stays what it is, so nothing can collapse onto it.

    Args:
        weight: in the loss.
        student: a causal language model, with its adapters if it has any.
        teacher: another with the same tokenizer.
        layers: LAYER_MAP.
        seed: of the projections.

    Attributes:
        module: projections of the student's states; None where they need none.

    Raises:
        SettingsError: LAYER_MAP names a layer that is not there.
    """

    name = "hidden"

    def __init__(
        self, weight: float, student: Any, teacher: Any, layers: str = "last", seed: int = 0
    ) -> None:
        self.weight = weight
        own, theirs = (decoder_layers(model) for model in (student, teacher))
        pairs = layer_map(layers, len(own), len(theirs))
        self._pairs = [(own[s], theirs[t]) for s, t in pairs]
        self._recorded: dict[tuple[int, int], Tensor] = {}
        self.module: nn.ModuleList | None = None
        configs = [without_adapters(m).config.get_text_config() for m in (student, teacher)]
        width, wanted = (config.hidden_size for config in configs)
        if width != wanted:  # its arguments are named for a map from the teacher, in ALIGN hidden
            with seeded(seed):
                self.module = nn.ModuleList(HiddenProjection(width, wanted) for _ in pairs)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """As `Term`; the recorded outputs are dropped afterwards."""
        hooks = [
            module.register_forward_hook(partial(self._record, (i, side)))
            for i, pair in enumerate(self._pairs)
            for side, module in enumerate(pair)
        ]
        try:
            yield
        finally:
            self._recorded = {}
            for hook in hooks:
                hook.remove()

    def _record(self, which: tuple[int, int], module: nn.Module, inputs: Any, out: Any) -> None:
        self._recorded[which] = out[0] if isinstance(out, tuple) else out

    def count(self, batch: Batch) -> int:
        """Real tokens."""
        return int(batch.counts.sum())

    def __call__(self, batch: Batch, rows: Tensor) -> Tensor:
        """As `Term`; every token that predicts one that counts is compared."""
        values = []
        for i in range(len(self._pairs)):
            student, teacher = (self._recorded[i, side].flatten(0, 1)[rows] for side in (0, 1))
            student = saturated(student)
            if self.module is not None:
                student = self.module[i](student)
            values.append(state_distance(student, teacher).sum())
        return torch.stack(values).mean()
