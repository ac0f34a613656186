"""Loss terms by what a student's layers put out: hidden states, and relations of attention.

Both look at the forward passes that there are anyway, by hooks, and so under any kind of attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard.seeds import seeded
from ssl_kd.language.aligned import HiddenProjection
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.losses.features import relation_divergence, state_distance
from ssl_kd.losses.rows import saturated
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import without_adapters
from ssl_kd.teachers.layers import attention_projections, decoder_layers

LayerMap = Sequence[tuple[int, int]]
"""Pairs of a student's layer and the teacher's layer that it follows, from 0."""


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


def feature_terms(
    settings: LanguageSettings, student: Any, teacher: Any
) -> list[HiddenStates | AttentionRelations]:
    """The terms that ALPHA_HIDDEN and ALPHA_ATTENTION ask for, of a live teacher.

    Args:
        settings: their weights and LAYER_MAP.
        student: a causal language model, with its adapters if it has any.
        teacher: another with the same tokenizer.

    Raises:
        SettingsError: LAYER_MAP names a layer that is not there; or ALPHA_ATTENTION, and a model
            keeps queries, keys and values in one.
    """
    kinds = {HiddenStates: settings.alpha_hidden, AttentionRelations: settings.alpha_attention}
    if not any(kinds.values()):
        return []
    depths = [len(decoder_layers(model)) for model in (student, teacher)]
    pairs = layer_map(settings.layer_map, *depths)
    terms: list[HiddenStates | AttentionRelations] = []
    for kind, weight in kinds.items():
        if weight:
            with seeded(settings.seed):
                terms.append(kind(weight, student, teacher, pairs))
    return terms


class _FeatureTerm:
    """A term by what pairs of modules put out, of student and teacher.

    Args:
        weight: in the loss.
        pairs: a module of the student and one of the teacher each.

    Attributes:
        module: projections of the student's outputs; None where they need none.
    """

    name = ""

    def __init__(self, weight: float, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        self.weight, self._pairs = weight, pairs
        self.module: nn.ModuleList | None = None
        self._recorded: dict[tuple[int, int], Tensor] = {}

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

    def _outputs(self) -> list[tuple[Tensor, Tensor]]:
        """Of each pair, student and teacher `[batch, token, dim]`."""
        return [(self._recorded[i, 0], self._recorded[i, 1]) for i in range(len(self._pairs))]

    def count(self, batch: Batch) -> int:
        """Real tokens."""
        return int(batch.counts.sum())


class HiddenStates(_FeatureTerm):
    """`hidden`: `state_distance` of what paired layers put out, mean over the pairs.

    Where the widths differ, the student's states are projected to the teacher's width, by a linear
    map of each pair that learns with the student: the target stays what it is, so nothing can
    collapse onto it.

    Args:
        weight: in the loss.
        student: a causal language model.
        teacher: another.
        pairs: layers of both.
    """

    name = "hidden"

    def __init__(self, weight: float, student: Any, teacher: Any, pairs: LayerMap) -> None:
        layers = [decoder_layers(model) for model in (student, teacher)]
        super().__init__(weight, [(layers[0][s], layers[1][t]) for s, t in pairs])
        configs = [without_adapters(m).config.get_text_config() for m in (student, teacher)]
        own, wanted = (config.hidden_size for config in configs)
        if own != wanted:  # its arguments are named for a map from the teacher, in ALIGN hidden
            self.module = nn.ModuleList(HiddenProjection(own, wanted) for _ in pairs)

    def __call__(self, batch: Batch, rows: Tensor) -> Tensor:
        """As `Term`; every token that predicts one that counts is compared."""
        values = []
        for i, (student, teacher) in enumerate(self._outputs()):
            student = saturated(student.flatten(0, 1)[rows])
            if self.module is not None:
                student = self.module[i](student)
            values.append(state_distance(student, teacher.flatten(0, 1)[rows]).sum())
        return torch.stack(values).mean()


class AttentionRelations(_FeatureTerm):
    """`attention`: `relation_divergence` of queries, keys and values, mean over them and pairs.

    MiniLMv2's relations in place of TinyBERT's maps of attention: the projections' outputs are
    there under every kind of attention, fused ones too, where the maps never exist; and they
    compare models of other widths and numbers of heads. Before rotation, so by content.

    Of each row `[relation head, token, token]` in float32 is computed again in the backward pass,
    and so there is one at a time.

    Args:
        weight: in the loss.
        student: a causal language model.
        teacher: another.
        pairs: layers of both.

    Raises:
        SettingsError: a model keeps queries, keys and values in one projection.
    """

    name = "attention"

    def __init__(self, weight: float, student: Any, teacher: Any, pairs: LayerMap) -> None:
        found: list[tuple[nn.Module, nn.Module]] = []
        for s, t in pairs:
            found += zip(_projections(student, s), _projections(teacher, t), strict=True)
        super().__init__(weight, found)
        widths = [int(getattr(p, "out_features", 0)) for pair in found for p in pair]
        most = without_adapters(teacher).config.get_text_config().num_attention_heads
        self.heads = max(n for n in range(1, most + 1) if math.gcd(*widths) % n == 0)

    def __call__(self, batch: Batch, rows: Tensor) -> Tensor:
        """As `Term`; every token that predicts one that counts is a query."""
        queries = rows.split(batch.counts[:, 1:].sum(1).tolist())
        length, values = batch.input_ids.shape[1], []
        for student, teacher in self._outputs():
            for i, some in enumerate(queries):
                given = student[i], teacher[i], some - i * length, batch.documents[i], self.heads
                found = checkpoint(
                    relation_divergence, *given, use_reentrant=False, preserve_rng_state=False
                )
                values.append(found.sum())
        return torch.stack(values).sum() / len(self._pairs)


def _projections(model: Any, layer: int) -> tuple[nn.Module, ...]:
    """Those to queries, keys and values."""
    found = attention_projections(decoder_layers(model)[layer])
    if found is None:
        raise SettingsError(
            "ALPHA_ATTENTION compares queries, keys and values, which"
            f" {type(without_adapters(model)).__name__} does not keep apart (q_proj, k_proj,"
            " v_proj): set it to 0; ALPHA_HIDDEN takes any model."
        )
    return found
