"""List the kinds of teachers, and what each of them refuses in the settings.

A new kind is a file with a subclass of `ssl_kd.language.teachers.base.Teacher`, and a line in
`KINDS`. This module needs no torch, so that settings are checked, and `--help` is shown, at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.core.settings import SettingsError
from ssl_kd.language.losses.divergences import selects_by_student

if TYPE_CHECKING:
    from ssl_kd.language.settings import LanguageSettings
    from ssl_kd.language.teachers.base import Teacher


@dataclass(frozen=True)
class Kind:
    """A kind of teacher.

    Attributes:
        path: module below `ssl_kd.language.teachers` and class, which is a `Teacher`.
        is_chosen: whether the settings ask for this kind.
        check: raises SettingsError for the first setting that this kind does not support.
        reads_no_images: the setting to change if the text holds images, and how; None for a kind
            of teacher that can read them.
    """

    path: str
    is_chosen: Callable[[LanguageSettings], Any]
    check: Callable[[LanguageSettings], None] = lambda settings: None
    reads_no_images: tuple[str, str] | None = None

    def load(self) -> type[Teacher]:
        """Import the class."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(f"ssl_kd.language.teachers.{module}"), name)


def kinds_of(settings: LanguageSettings) -> list[Kind]:
    """Return the kinds that the settings ask for: a cache may hold the answers of a server."""
    return [kind for kind in KINDS if kind.is_chosen(settings)]


def teacher_class(settings: LanguageSettings) -> type[Teacher]:
    """Return the class of the teacher that these settings ask for."""
    return kinds_of(settings)[0].load()


def _check_none(settings: LanguageSettings) -> None:
    if settings.alpha_ce == 0:
        raise SettingsError(
            "TEACHER_MODEL is 'none' and ALPHA_CE is 0, so there is no loss: set ALPHA_CE above 0,"
            " or name a teacher."
        )
    if settings.teacher_cache is not None:
        raise SettingsError(
            f"TEACHER_CACHE is {settings.teacher_cache!r}, but TEACHER_MODEL is 'none': set"
            " TEACHER_MODEL to the teacher whose answers the cache holds."
        )
    if settings.generates:
        raise SettingsError(
            f"{settings.generates} is above 0, which needs a teacher, but TEACHER_MODEL is 'none':"
            " name a TEACHER_MODEL."
        )


def _check_self(settings: LanguageSettings) -> None:
    _check_defaults(
        settings,
        "TEACHER_MODEL is 'self', which is the student in this process",
        *("teacher_cache", "teacher_url", "teacher_text", "align", "router_mode", "router_weights"),
    )


def _check_cached(settings: LanguageSettings) -> None:
    for name, is_live in (
        ("ROUTER_MODE", settings.router_mode in ("sar", "ka")),
        ("ALIGN", settings.align != "auto"),
        ("ON_POLICY", settings.on_policy),
        ("TEACHER_TEXT", settings.teacher_text),
        ("LEGACY_CLAMP", settings.legacy_clamp is not None),
    ):
        if is_live:
            value = getattr(settings, name.lower())
            raise SettingsError(
                f"{name} is {value!r}, which needs a live teacher: set TEACHER_CACHE to None."
            )


def _check_served(settings: LanguageSettings) -> None:
    if settings.to_train or settings.teacher_model == "none":
        raise SettingsError(
            f"TEACHER_MODEL is {settings.teacher_model!r}, but TEACHER_URL needs the tokenizer of"
            " the served teacher: set TEACHER_MODEL to the teacher's folder or Hub name."
        )
    if settings.temperature != 1:
        raise SettingsError(
            f"TEMPERATURE is {settings.temperature:g}, but the server at TEACHER_URL returns"
            " probabilities at temperature 1 only: set TEMPERATURE to 1."
        )
    if settings.student_model.startswith("layers:"):
        raise SettingsError(
            f"STUDENT_MODEL is {settings.student_model!r}, which is cut from the teacher, but"
            " TEACHER_URL runs the teacher on a server: set STUDENT_MODEL to a folder, or to"
            " llama:LAYERSxDIM."
        )
    if selects_by_student(settings.divergence):
        raise SettingsError(
            f"DIVERGENCE is {settings.divergence!r}, which needs the teacher's probabilities of the"
            " student's likeliest tokens, but TEACHER_URL provides only the teacher's own: set"
            " DIVERGENCE to 'reverse_kl'."
        )
    if settings.teacher_text:
        raise SettingsError(
            f"TEACHER_TEXT is {settings.teacher_text:g}, which needs a local teacher, but"
            " TEACHER_URL is set: set TEACHER_TEXT to 0."
        )
    router = () if settings.router_mode == "auto" else ("router_mode",)  # native for a server
    _check_defaults(
        settings,
        "the server at TEACHER_URL returns only the likeliest tokens of an unchanged teacher",
        *("align", *router, "router_weights", "legacy_clamp"),
    )


def _check_tagged(settings: LanguageSettings) -> None:
    names, tags = settings.teacher_names, settings.teacher_tags
    is_plain = all((*tags, *names)) and len({*tags}) == len(names) > 1
    if settings.teacher_url or not is_plain or settings.teacher_shares:
        raise SettingsError(
            f"TEACHER_FIELD is set, and TEACHER_MODEL is {settings.teacher_model!r}: expected local"
            " ones, each with its own tag and no weight: 'math=A, code=B'."
        )
    if settings.teacher_text:
        raise SettingsError(
            f"TEACHER_TEXT is {settings.teacher_text:g}, but TEACHER_FIELD is set: set TEACHER_TEXT"
            " to 0."
        )
    _check_names(settings)


def _check_several(settings: LanguageSettings) -> None:
    if all("=" in name and not Path(name).is_dir() for name in settings.teacher_names):
        raise SettingsError(
            f"TEACHER_MODEL is {settings.teacher_model!r}, but TEACHER_FIELD is None: set it to the"
            " field of the records that holds these tags."
        )
    _check_names(settings)


def _check_names(settings: LanguageSettings) -> None:
    if any(name.partition(":")[0] in ("train", "none", "") for name in settings.teacher_names):
        raise SettingsError(
            f"TEACHER_MODEL is {settings.teacher_model!r}: expected folders, or names on the Hub,"
            " separated by commas ('train' and 'none' cannot be combined)."
        )
    _check_defaults(
        settings,
        "TEACHER_MODEL names several teachers, which run live, unchanged and with the student's"
        " tokenizer",
        *("align", "router_mode", "router_weights", "teacher_cache"),
    )


def _check_aligned(settings: LanguageSettings) -> None:
    if settings.router_mode == "sar":
        raise SettingsError(
            f"ALIGN is {settings.align!r}, but ROUTER_MODE 'sar' needs teacher and student to have"
            " the same tokenizer: set ROUTER_MODE to 'all' or 'ka', or ALIGN to 'auto'."
        )
    if settings.generates:
        raise SettingsError(
            f"{settings.generates} is above 0, which needs a teacher with the student's tokenizer,"
            f" but ALIGN is {settings.align!r}: set ALIGN to 'auto'."
        )
    if not settings.learn_thoughts:
        raise SettingsError(
            f"LEARN_THOUGHTS is False, but ALIGN is {settings.align!r}: set LEARN_THOUGHTS to True."
        )


def _check_defaults(settings: LanguageSettings, reason: str, *names: str) -> None:
    """Raise SettingsError for the first of these settings that has not its default."""
    for name in names:
        value, default = getattr(settings, name), getattr(type(settings), name)
        if value != default:
            setting = name.upper()
            raise SettingsError(
                f"{setting} is {value!r}, but {reason}: set {setting} to {default!r}."
            )


KINDS = (
    Kind("base.Teacher", lambda s: s.teacher_model == "none", _check_none),
    Kind(
        "self_teacher.SelfTeacher",
        lambda s: s.teacher_model == "self",
        _check_self,
        ("TEACHER_MODEL", "name a model"),
    ),
    Kind("cached.Cached", lambda s: s.teacher_cache is not None, _check_cached),
    Kind(
        "served.Served",
        lambda s: s.teacher_url is not None,
        _check_served,
        ("TEACHER_URL", "set it to None"),
    ),
    Kind(
        "tagged.Tagged",
        lambda s: s.teacher_field is not None,
        _check_tagged,
        ("TEACHER_MODEL", "name one"),
    ),
    Kind(
        "live.Live",
        lambda s: len(s.teacher_names) > 1 and s.teacher_field is None,
        _check_several,
        ("TEACHER_MODEL", "name one"),
    ),
    Kind(
        "aligned.Aligned",
        lambda s: s.align != "auto",
        _check_aligned,
        ("ALIGN", "set it to 'auto'"),
    ),
    Kind("routed.Routed", lambda s: s.is_routed),
    Kind(
        "live.Live",
        lambda s: s.to_train is not None,
        reads_no_images=("TEACHER_MODEL", "name a model that reads images"),
    ),
    Kind("live.Live", lambda s: True),
)
"""All kinds; if the settings ask for several, the first one is the teacher of the run."""
