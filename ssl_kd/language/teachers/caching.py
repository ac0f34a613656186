"""Run a teacher over the text of a run, and write its answers to a cache for later runs."""

from __future__ import annotations

import gc
import hashlib
import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.clock import Progress, no_progress
from ssl_kd.core.runs.process_group import ProcessGroup
from ssl_kd.core.runs.ranks import joined, refuse_ranks
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.models.causal import CausalLM, n_ids
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.preflight import CACHES, Texts, check_before_loading
from ssl_kd.language.prepare import ModelLoader, prepare
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.cache import TeacherCache, TeacherFingerprint, cache_identity, write
from ssl_kd.language.teachers.load import ONE_RANK
from ssl_kd.language.teachers.routed import Routed
from ssl_kd.language.teachers.served import ServedTeacher
from ssl_kd.language.text.blocks import Blocks
from ssl_kd.language.text.rows import first_rows, lay_out, with_chat_template
from ssl_kd.language.train.step import precision_of

logger = logging.getLogger(__name__)

_KEYED = (  # settings that a cache depends on
    "teacher_model teacher_url teacher_served_as cache_method quantization router_mode"
    " router_weights data_path eval_path text_field block_size train_rows packing temperature"
    " model_dtype student_text rollout_temperature max_new_tokens num_generations seed"
    " learn_thoughts teacher_prompt_template teacher_field chat_template_path"
    " chat_template_kwargs"
).split()
TIMEOUT = timedelta(days=1)  # for which ranks wait for each other's files
SERVED_TOKENS = 2**18  # in a file, and so the most that are requested again after an interruption


def cache_teacher(settings: LanguageSettings, *, progress: Progress = no_progress) -> TeacherCache:
    """Run the teacher over the full text once, and write its predictions to TEACHER_CACHE.

    Runs with the same settings then learn from the cache. Processes started by torchrun split the
    text; BATCH_SIZE is the batch of each of them.

    Raises:
        SettingsError: TEACHER_MODEL or TEACHER_CACHE is not set.
        FingerprintMismatch: the folder holds another cache, and FORCE_RECOMPUTE is not set.
        RankLost: another rank does not respond.
    """
    settings.check_packages()
    if settings.teacher_cache is None:
        raise SettingsError("TEACHER_CACHE is None: set it to the folder of the cache.")
    if settings.teacher_model == "none":
        raise SettingsError("TEACHER_MODEL is 'none': name the teacher to cache.")
    with joined(settings.device, timeout=TIMEOUT) as ranks:
        precision = precision_of(settings.replace(device=ranks.device))
        precision.log(logger)
        texts = check_before_loading(settings.with_cache_router(), precision, work="cache")
        settings = _with_folder(settings, texts).with_cache_router()
        loader = ModelLoader(settings, texts[0], precision, progress, ranks)
        return _cache_teacher(loader, texts)


def _cache_teacher(loader: ModelLoader, texts: Texts) -> TeacherCache:
    """Write the cache, after settings and models were checked."""
    settings, precision = loader.settings, loader.precision
    assert settings.teacher_cache is not None
    teacher, blocks = _teacher_and_rows(loader, texts)
    method, k = settings.cache_spec
    dtype, rows = "served", None
    if teacher.model is None:
        rows = max(1, SERVED_TOKENS // settings.block_size)
        size = settings.block_size
        tokenizer = teacher.tokenizer
        device = precision.device
        answers = ServedTeacher.of(settings, size, tokenizer, device, rounded=False)
    else:
        answers = FrozenTeacher(teacher.model, device=precision.device, dtype=precision.teacher)
        if settings.is_routed:
            routed = Routed(answers, settings)
            routed.begin()
            answers = routed.answer_once
        dtype = str(precision.teacher).removeprefix("torch.")
        if settings.quantization is not None:
            dtype = f"nf4 {dtype}"
    fingerprint = TeacherFingerprint(
        **cache_identity(settings, teacher, texts[0], blocks),
        dtype=dtype,
        method=method,
        k=k,
    )
    return write(
        answers,
        blocks,
        settings.teacher_cache,
        fingerprint,
        vocabulary=n_ids(teacher.tokenizer),
        batch_size=settings.batch_size,
        shard_rows=rows,
        force=settings.force_recompute,
        rebuild=settings.rebuild_damaged,
        ranks=ProcessGroup(precision.device),
        progress=lambda done, total: loader.progress("cache", done, total, {}),
    )


def _teacher_and_rows(loader: ModelLoader, texts: Texts) -> tuple[CausalLM, Blocks]:
    """Return the teacher, and the rows of the text that a run trains on."""
    settings = loader.settings
    if settings.student_text:  # the student writes the rows, and is not kept
        alone = settings.replace(teacher_cache=None)
        live = prepare(alone, loader.precision, loader.progress, loader.ranks, texts=texts)
        (teacher,), blocks = live.teacher.lms, live.blocks
    else:
        teacher = with_chat_template(loader.teacher(), settings)
        blocks = lay_out(settings.block_size, settings.packing, texts[0], teacher)
        blocks = first_rows(blocks, settings.train_rows)
    assert isinstance(blocks, Blocks)  # ALIGN is refused with a cache
    return teacher, replace(blocks, by_student=None)  # a cache has the order of the text


def with_automatic_cache(
    settings: LanguageSettings, precision: Precision, progress: Progress, texts: Texts
) -> LanguageSettings:
    """Write the cache of TEACHER_CACHE auto unless it is there; return settings with its folder."""
    if settings.teacher_cache != "auto":
        return settings
    settings = _with_folder(settings, texts)
    if settings.force_recompute or not Path(f"{settings.teacher_cache}/teacher.json").exists():
        refuse_ranks()
        native = settings.with_cache_router()
        _cache_teacher(ModelLoader(native, texts[0], precision, progress, ONE_RANK), texts)
        gc.collect()  # frees the teacher's memory
    return settings


def _with_folder(settings: LanguageSettings, texts: Texts) -> LanguageSettings:
    """Return the settings with a folder for them and their text in place of TEACHER_CACHE auto."""
    if settings.teacher_cache != "auto":
        return settings
    values = [(name, getattr(settings, name)) for name in _KEYED]
    values.append(("text", texts[0].digest))
    values += [("student_model", settings.student_model)] * (settings.student_text > 0)
    folder = CACHES / hashlib.sha256(repr(values).encode()).hexdigest()[:16]
    return settings.replace(teacher_cache=str(folder))
