"""Settings of the language mode that do not fit together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ssl_kd.errors import InputError
from ssl_kd.imports import check_installed
from ssl_kd.language.names import GIVEN
from ssl_kd.language.schedules import check_schedule
from ssl_kd.settings import SettingsError

if TYPE_CHECKING:
    from ssl_kd.language.settings import LanguageSettings


def check_packages(settings: LanguageSettings) -> None:
    """Raise MissingPackage where what these settings need is not installed, before any work."""
    texts = (settings.data_path, settings.eval_path or "")
    needed = {
        "transformers": True,
        "peft": settings.lora_rank > 0,
        "datasets": any(text.startswith("hf:") for text in texts),
        "aiohttp": settings.teacher_url is not None,
    }
    check_installed([name for name, needs in needed.items() if needs], "llm")


def check_language(settings: LanguageSettings) -> None:
    """Raise SettingsError where settings that are fine alone do not fit together."""
    if settings.alpha_kd == settings.alpha_ce == 0:
        raise SettingsError("ALPHA_KD and ALPHA_CE are both 0, so there is nothing to learn.")
    if settings.teacher_model == "none" and settings.alpha_ce == 0:
        raise SettingsError("TEACHER_MODEL is 'none', so ALPHA_CE must be above 0.")
    if settings.teacher_model == "none" and settings.teacher_cache is not None:
        raise SettingsError("TEACHER_CACHE needs the TEACHER_MODEL that it was made by.")
    live = settings.router_mode == "sar" or settings.align != "auto"
    if settings.teacher_cache is not None and live:
        way = "Set TEACHER_CACHE to None, or ROUTER_MODE to 'ka' and ALIGN to 'auto'"
        raise SettingsError(
            "TEACHER_CACHE holds the teacher's distributions alone: a router that learns "
            f"(ROUTER_MODE 'sar') and ALIGN need the teacher itself. {way}."
        )
    if settings.router_mode == "sar" and settings.align != "auto":
        raise SettingsError(
            "ROUTER_MODE 'sar' compares teacher and student token by token, so ALIGN must be"
            " 'auto' and the tokenizers the same; 'all' and 'ka' go with any ALIGN."
        )
    if settings.align == "hidden" and settings.alpha_ce == 0:
        raise SettingsError(
            "ALIGN 'hidden' matches hidden states alone, which leaves the output head untrained:"
            " set ALPHA_CE above 0."
        )
    if settings.shard and (settings.baseline or settings.teacher_offload):
        raise SettingsError(
            "SHARD keeps pieces of the models on each GPU: BASELINE (a second student) and"
            " TEACHER_OFFLOAD do not go with it, so set them to False."
        )
    if settings.shard and (settings.router_mode != "native" or settings.router_weights is not None):
        raise SettingsError(
            "SHARD takes a teacher with the experts and router that it came with: set"
            " ROUTER_MODE to 'native' and ROUTER_WEIGHTS to None."
        )
    if settings.teacher_url is not None:
        _check_served(settings, settings.teacher_url)
    if len(settings.teacher_names) > 1 or settings.teacher_weights is not None:
        _check_several(settings)
    _check_mean(settings)
    _check_features(settings)
    _check_quantization(settings)
    check_schedule(settings)
    _check_on_policy(settings)
    if settings.legacy_clamp is not None:
        _check_clamp(settings, settings.legacy_clamp)


def _check_served(settings: LanguageSettings, url: str) -> None:
    from ssl_kd.teachers.http_client import check_url  # --help does without torch

    try:
        check_url(url)
    except InputError as error:
        raise SettingsError(f"{error}.") from error
    if settings.teacher_model in ("train", "none"):
        raise SettingsError(
            f"TEACHER_URL needs the tokenizer of the teacher that is served, and TEACHER_MODEL is"
            f" {settings.teacher_model!r}: name its folder, or its name on the Hub."
        )
    if settings.temperature != 1:
        raise SettingsError(
            f"TEMPERATURE is {settings.temperature:g}, and a server gives the likeliest tokens at"
            " temperature 1, from which those of another one do not follow: set it to 1."
        )
    if settings.student_model.startswith("layers:"):
        raise SettingsError(
            f"STUDENT_MODEL {settings.student_model!r} is cut from the teacher, whose weights are"
            " on a server (TEACHER_URL): name a folder, or new weights as llama:LAYERSxDIM."
        )
    native = settings.router_mode in ("native", "auto") and settings.router_weights is None
    if settings.align != "auto" or not native or settings.legacy_clamp is not None:
        raise SettingsError(
            "TEACHER_URL gives a teacher's likeliest tokens alone: ALIGN must be 'auto',"
            " ROUTER_MODE 'native', and ROUTER_WEIGHTS and LEGACY_CLAMP None."
        )


def _check_several(settings: LanguageSettings) -> None:
    names, weights = settings.teacher_names, settings.teacher_weights
    try:
        shares = settings.teacher_shares or (1.0,) * len(names)
    except ValueError:
        shares = ()
    if len(shares) != len(names) or not all(0 < share < math.inf for share in shares):
        raise SettingsError(
            f"TEACHER_WEIGHTS is {weights!r}, and TEACHER_MODEL names {len(names)} teacher(s):"
            " expected a number above 0 for each, such as '0.7,0.3'."
        )
    if len(names) == 1:
        return
    if not all(names) or {"train", "none"} & set(names):
        raise SettingsError(
            f"TEACHER_MODEL is {settings.teacher_model!r}: expected folders, or names on the Hub,"
            " separated by commas ('train' and 'none' stand alone)."
        )
    native = settings.router_mode == "native" and settings.router_weights is None
    alone = settings.teacher_cache is None and not settings.shard
    if settings.align != "auto" or not native or not alone:
        raise SettingsError(
            "Several teachers are asked as they came, on the student's tokens: ALIGN must be"
            " 'auto', ROUTER_MODE 'native', ROUTER_WEIGHTS and TEACHER_CACHE None, SHARD False."
        )


def _check_features(settings: LanguageSettings) -> None:
    """What compares layers needs the teacher itself, at the student's tokens."""
    weights = {"ALPHA_HIDDEN": settings.alpha_hidden, "ALPHA_ATTENTION": settings.alpha_attention}
    asked = " and ".join(name for name, weight in weights.items() if weight)
    if not asked:
        return
    none, routed = settings.teacher_model == "none", settings.router_mode not in ("native", "auto")
    for unfit, why, way in (
        (none, "TEACHER_MODEL is 'none'", "name a teacher"),
        (settings.teacher_url, "the teacher is on a server (TEACHER_URL)", "name its folder"),
        (len(settings.teacher_names) > 1, "TEACHER_MODEL names several", "name one"),
        (settings.teacher_cache, "TEACHER_CACHE holds distributions alone", "set it to None"),
        (settings.align != "auto", f"ALIGN is {settings.align!r}", "set it to 'auto'"),
        (routed, f"ROUTER_MODE is {settings.router_mode!r}", "set it to 'native'"),
        (settings.router_weights, "ROUTER_WEIGHTS is another router's", "set it to None"),
    ):
        if unfit:
            raise SettingsError(
                f"{asked} compares layers of the student with those of a live teacher that reads"
                f" the same tokens, as it came, but {why}: {way}, or {asked} to 0."
            )


def _check_mean(settings: LanguageSettings) -> None:
    packed = settings.packing and not (settings.on_policy or settings.teacher_text)
    unfit = packed or settings.align != "auto" or settings.legacy_clamp is not None
    if settings.loss_mean == "sequences" and unfit:
        raise SettingsError(
            "LOSS_MEAN 'sequences' takes a row for a sequence, and weighs its tokens in both terms:"
            " set PACKING to False, ALIGN to 'auto' and LEGACY_CLAMP to None."
        )


def _check_quantization(settings: LanguageSettings) -> None:
    """Weights in fewer bits are loaded for one device, and stay as they are."""
    kind = settings.student_model.partition(":")[0]
    made = kind in ("fresh", "llama", "layers", GIVEN)
    absent = settings.teacher_url is not None or settings.teacher_model in ("none", GIVEN)
    rules = {
        "TEACHER_QUANTIZATION": (
            (absent, "name a TEACHER_MODEL that is loaded here"),
            (kind == "layers", f"STUDENT_MODEL {kind!r} cuts whole weights"),
            (settings.teacher_offload, "set TEACHER_OFFLOAD to False"),
            (settings.shard, "set SHARD to False"),
        ),
        "LORA_QUANTIZATION": (
            (not settings.lora_rank, "set LORA_RANK above 0: it is of the base of adapters"),
            (made, "name a STUDENT_MODEL that is loaded"),
            (settings.lora_merge, "set LORA_MERGE to False: who loads the adapters merges them"),
            (settings.shard, "set SHARD to False"),
        ),
    }
    for name, rule in rules.items():
        value = getattr(settings, name.lower())
        for unfit, way in rule:
            if value is not None and unfit:
                raise SettingsError(f"{name} is {value!r}: {way}, or set it to None.")


def _check_on_policy(settings: LanguageSettings) -> None:
    if settings.is_contrastive and not settings.on_policy:
        raise SettingsError(
            "DIVERGENCE 'distillm2' contrasts text with what the student writes: set ON_POLICY"
            " above 0, 1 for a pair of each row."
        )
    names = [name for name in ("on_policy", "teacher_text") if getattr(settings, name)]
    if not names:
        return
    who = " and ".join(map(str.upper, names))
    if settings.teacher_model == "none" or (settings.on_policy and settings.alpha_kd == 0):
        raise SettingsError(
            f"{who} needs a teacher (TEACHER_MODEL), and ON_POLICY an ALPHA_KD above 0: the student"
            " learns from its own text by the teacher's judgement alone."
        )
    if settings.teacher_cache is not None or settings.align != "auto" or settings.shard:
        raise SettingsError(
            f"{who} needs a teacher at work, with the student's tokenizer, and whole models: set"
            " TEACHER_CACHE to None, ALIGN to 'auto' and SHARD to False."
        )
    if settings.teacher_text and settings.teacher_url is not None:
        raise SettingsError(
            "TEACHER_TEXT is written by a teacher that is here, and TEACHER_URL names a server: set"
            " one of them to its default."
        )


def _check_clamp(settings: LanguageSettings, clamp: str) -> None:
    from ssl_kd.losses.legacy_clamp import LegacyClamp  # --help does without torch

    try:
        LegacyClamp.parse(clamp)
    except ValueError as error:
        raise SettingsError(f"LEGACY_CLAMP: {error}.") from error
    if settings.align != "auto" or settings.teacher_cache is not None:
        raise SettingsError(
            "LEGACY_CLAMP holds the logits of both, token by token, as older scripts did: ALIGN"
            " must be 'auto' and TEACHER_CACHE None."
        )
