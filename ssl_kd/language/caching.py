"""A cache of a teacher's answers: written once, and read in the place of the teacher."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ssl_kd.datasets.blocks import Blocks
from ssl_kd.datasets.text import TextDataset
from ssl_kd.divergences import DIVERGENCES
from ssl_kd.language.kept import Kept, LastHidden, Sampled, TopK
from ssl_kd.language.routed import KA_LAMBDA, Routed, RoutedDraw
from ssl_kd.language.served import ServedTeacher, served_lm
from ssl_kd.language.setting_groups import RouterSettings
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import precision_of
from ssl_kd.language.teacher import at_work, load_teacher, router_id
from ssl_kd.language.teacher_cache import TeacherCache, TeacherFingerprint, identity, write
from ssl_kd.language.text_rows import lay_out, texts_of
from ssl_kd.language.trained_teacher import trained_teacher
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import CausalLM, n_ids
from ssl_kd.training.clock import Progress, no_progress
from ssl_kd.training.process_group import ProcessGroup
from ssl_kd.training.ranks import Ranks, joined

logger = logging.getLogger(__name__)

SHARDS_APART = timedelta(days=1)  # that ranks may be, at the end of a cache
SERVED_TOKENS = 2**18  # in a file: what is asked for again at most where a server is lost


def cache_teacher(
    settings: LanguageSettings, *, progress: Progress = no_progress
) -> list[TeacherCache]:
    """Run the teacher over the whole text once, and write its answers to TEACHER_CACHE.

    Runs with the same settings then learn from it, without the teacher in memory. Processes that
    torchrun started share the text; BATCH_SIZE is of each one's forward passes.

    Args:
        settings: those of the runs to come; CACHE_METHOD.
        progress: called as `progress(stage, done, total, info)`.

    Returns:
        The cache; for ROUTER_MODE ka one for each of KA_DRAWS draws of experts.

    Raises:
        SettingsError: there is no teacher or no folder to write to.
        FingerprintMismatch: the folder holds a cache of something else, and not FORCE_RECOMPUTE.
        RankLost: another rank does not answer.
    """
    settings.check_packages()
    if settings.teacher_cache is None:
        raise SettingsError("TEACHER_CACHE is None: name the folder that the cache goes to.")
    if settings.teacher_model == "none":
        raise SettingsError("TEACHER_MODEL is 'none', so there is nothing to keep.")
    if Path(settings.teacher_cache).is_file():
        raise SettingsError(
            f"TEACHER_CACHE is {settings.teacher_cache!r}, a file: expected a folder, or a name for"
            " a new one."
        )
    settings = settings.of_cache()
    check_divergence(settings.kind_of_divergence, settings.kept[0])
    with joined(settings.device, timeout=SHARDS_APART) as ranks:
        return _cache(settings, ranks, progress)


def _cache(settings: LanguageSettings, ranks: Ranks, tell: Progress) -> list[TeacherCache]:
    precision = precision_of(settings.replace(device=ranks.device))
    texts, held_out = texts_of(settings)
    settings.check_images(texts.pictured, held_out.pictured)
    name, (method, k) = settings.teacher_model, settings.kept
    if settings.to_train:
        name = str(trained_teacher(settings, texts, precision, tell, ranks))
    if settings.teacher_url is not None:
        teacher = served_lm(settings.teacher_model, settings.teacher_served_as)
    else:
        teacher = load_teacher(settings, name, precision)
    blocks = lay_out(settings.block_size, settings.packing, texts, teacher, teacher)
    assert isinstance(blocks, Blocks)
    routed, dtype, rows = None, "served", None
    if teacher.model is None:
        rows = max(1, SERVED_TOKENS // settings.block_size)
        answers = ServedTeacher.of(
            settings, settings.block_size, teacher.tokenizer, precision.device, rounded=False
        )
    else:
        answers = at_work(precision, teacher, ranks, shard=settings.shard)
        routed = Routed(answers, settings) if settings.is_routed else None
        dtype = str(precision.teacher).removeprefix("torch.")
        if settings.quantization is not None:
            dtype = f"{settings.quantization} {dtype}"
    fingerprint = TeacherFingerprint(
        **cache_of(settings, settings.temperature, teacher, texts, blocks),
        dtype=dtype,
        method=method,
        k=k,
    )
    if teacher.model is not None:
        head = tuple(teacher.model.get_output_embeddings().weight.shape)
        found = sizes(blocks, head, k, precision.teacher)
        _say_sizes(found, method, int(blocks.counts.sum()))
    caches = []
    for i, folder in enumerate(cache_folders(str(settings.teacher_cache), settings.draws)):
        caches.append(
            write(
                answers if routed is None else RoutedDraw(routed, i, settings.seed),
                blocks,
                folder,
                fingerprint,
                vocabulary=n_ids(teacher.tokenizer),
                batch_size=settings.batch_size,
                shard_rows=rows,
                force=settings.force_recompute,
                rebuild=settings.rebuild_damaged,
                team=ProcessGroup(precision.device),
                in_step=settings.shard,
                progress=lambda done, total: tell("cache", done, total, {}),
            )
        )
    return caches


def sizes(
    blocks: Blocks, head: tuple[int, int], k: int, dtype: torch.dtype
) -> dict[str, tuple[float, int]]:
    """How large a cache of some rows would be by each CACHE_METHOD, before one is made.

    Args:
        blocks: rows of tokens.
        head: shape of the teacher's output head, vocabulary and width.
        k: tokens at each position.
        dtype: of hidden states.

    Returns:
        From the method to bytes for a token that counts, places of those that do not count
        included, and bytes that are kept once. Under `whole logits` what these would take.
    """
    vocabulary, dim = head
    k = min(k, vocabulary)
    kept: Mapping[str, Kept] = {
        "sample": Sampled(k, 1.0, vocabulary),
        "topk": TopK(k, 1.0, vocabulary),
        "hidden": LastHidden(vocabulary, dim, dtype, ""),
    }
    places = blocks.ids.numel() / max(int(blocks.counts.sum()), 1)
    found = {name: (places * one.bytes_a_position(), 0) for name, one in kept.items()}
    found["hidden"] = found["hidden"][0], vocabulary * dim * dtype.itemsize
    return found | {"whole logits": (places * vocabulary * dtype.itemsize, 0)}


def _say_sizes(found: dict[str, tuple[float, int]], chosen: str, tokens: int) -> None:
    logger.info("a cache of these %s tokens by each CACHE_METHOD, about:", f"{tokens:,}")
    logger.info("method        bytes a token         MiB")
    for name, (each, once) in found.items():
        whole = (each * tokens + once) / (1 << 20)
        mark = "  <- this one" if name == chosen else ""
        logger.info("%-12s %14s %11s%s", name, f"{each:,.0f}", f"{whole:,.1f}", mark)


def cache_of(
    settings: RouterSettings,
    temperature: float,
    teacher: CausalLM,
    texts: TextDataset,
    blocks: Blocks,
) -> dict[str, Any]:
    """The fields of its fingerprint that a teacher's cache must have for this run."""
    weights = teacher.weights_id
    if settings.router_mode != "native":
        weights += f" ka {KA_LAMBDA:g}" if settings.router_mode == "ka" else " all"
    if router := router_id(settings.router_weights):
        weights += f" router {router}"
    of = identity(teacher.name, weights, teacher.tokenizer, texts, blocks)
    return of | {"temperature": temperature}


def cache_folders(folder: str, draws: int) -> list[Path]:
    """Where a teacher's caches are: with several draws of experts each in a folder of its own."""
    return [Path(folder, f"draw_{i}") for i in range(draws)] if draws > 1 else [Path(folder)]


def check_divergence(divergence: str, method: str) -> None:
    """Raise SettingsError where a cache of this CACHE_METHOD does not go with a divergence."""
    known = [name for name, entry in DIVERGENCES.items() if entry.from_samples]
    if method == "sample" and divergence not in known:
        raise SettingsError(
            f"DIVERGENCE is {divergence}, and a cache of CACHE_METHOD 'sample' "
            f"supports {', '.join(known)} only: set DIVERGENCE to {known[0]!r}, or make a cache "
            "with CACHE_METHOD 'topk' or 'hidden'"
        )
