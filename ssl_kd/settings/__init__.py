"""Settings: one declaration per field serves validation, messages, flags and the settings file.

A mode declares a frozen dataclass of :func:`setting` fields on top of :class:`Settings`. Its values
come from the defaults, a file of UPPER_CASE literals and the command line, the later ones winning.
"""

from __future__ import annotations

import ast
import codecs
import dataclasses
import difflib
import functools
import json
import math
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import Self

from ssl_kd.errors import InputError
from ssl_kd.settings.foreign_names import ALIASES, INSTEAD

_WIDTH = 100  # of a settings file
_WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text"}


class SettingsError(InputError):
    """A setting that is misspelt, of the wrong type or out of range; the message says which."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one setting may be, and what it does in words."""

    help: str
    more: str = ""  # sentences that follow `help` in the settings file
    section: str = ""  # title of the section of that file that begins here
    low: float | None = None
    above: float | None = None  # like `low`, the border itself left out
    high: float | None = None
    below: float | None = None  # like `high`, the border itself left out
    choices: tuple[str, ...] = ()
    forms: tuple[tuple[str, str], ...] = ()  # further choices: as shown, and as an expression
    words: tuple[str, ...] = ()  # what a number may also be, from its type: int | Literal["auto"]

    @property
    def bounded(self) -> bool:
        """Whether there is more to say than the type."""
        named = all(choice in self.help for choice in self.choices)
        return not named or {self.low, self.above, self.high, self.below} != {None}

    @property
    def span(self) -> str:
        """The range in few words: `1 to 4096`, `from 1`, `above 0`, `0 up to, not including, 1`."""
        start = "" if self.low is None else _number(self.low)
        if self.above is not None:
            start = f"above {_number(self.above)}"
        if self.high is not None:
            return f"{start} to {_number(self.high)}"
        if self.below is not None:
            return f"{start} up to, not including, {_number(self.below)}"
        return start if self.low is None else f"from {start}"

    @property
    def comment(self) -> str:
        """What stands above the setting in a settings file: `help`, the range, `more`."""
        what, semicolon, rest = self.help.partition(";")
        what = f"{what}, {self.span}" if self.span else what
        return f"{what[0].upper()}{what[1:]}{semicolon}{rest}. {self.more}".rstrip()


def setting(default: Any, help: str, more: str = "", **rule: Any) -> Any:
    """A dataclass field that carries its :class:`Rule`.

    Args:
        default: The value where neither file nor command line gives one.
        help: One line: what it does, its unit, what None means.
        more: Sentences for the settings file alone: when to change it, and what for.
        **rule: `section`, `low`, `above`, `high`, `below`, `choices` and `forms` of :class:`Rule`.
    """
    return dataclasses.field(default=default, metadata={"rule": Rule(help, more, **rule)})


@functools.cache
def _fields(cls: type) -> Mapping[str, tuple[type, bool, Rule]]:
    """Of each setting, in the file's order: plain type, whether it may be None, and its rule."""
    hints = typing.get_type_hints(cls)
    found = {}
    bases = filter(dataclasses.is_dataclass, cls.__bases__)
    inherited = dict.fromkeys(name for base in bases for name in _fields(base))
    # A dataclass puts first what it inherits; here it comes last, as the section of every run.
    places = {name: place for place, name in enumerate(inherited)}
    for field in sorted(dataclasses.fields(cls), key=lambda field: places.get(field.name, -1)):
        hint = hints[field.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        members = typing.get_args(hint) if union else (hint,)
        words = [m for m in members if typing.get_origin(m) is typing.Literal]
        (kind,) = (m for m in members if m is not types.NoneType and m not in words)
        rule = field.metadata["rule"]
        if words:
            rule = dataclasses.replace(rule, words=typing.get_args(words[0]))
        found[field.name] = (kind, types.NoneType in members, rule)
    return types.MappingProxyType(found)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base of a mode's settings: checks every field on construction.

    Raises:
        SettingsError: From construction and every method below; the message names the setting,
            what came, what is allowed, and for an unknown name the nearest one.
    """

    # Older and foreign names that are taken for a setting: that name -> the setting's.
    aliases: typing.ClassVar[Mapping[str, str]] = {}

    # Aliases whose value counts for one process, where the setting counts for all of them.
    per_process: typing.ClassVar[frozenset[str]] = frozenset()

    # Foreign names that no setting can stand for, or `hub_*` for a family of them: that name -> the
    # flags to use, in a sentence.
    instead: typing.ClassVar[Mapping[str, str]] = {}

    file_heading: typing.ClassVar[str] = ""  # what the settings file says at its top

    first: typing.ClassVar[tuple[str, ...]] = ()  # settings that --help shows; all of them if empty

    def __post_init__(self) -> None:
        """Check every field, then what holds between fields."""
        for name in _fields(type(self)):
            # Stored as `check` returns it: a whole number becomes a float where one is due.
            object.__setattr__(self, name, self.check(name, getattr(self, name)))
        self.check_together()

    def check_together(self) -> None:
        """Raise SettingsError where settings that are fine alone do not fit together."""

    @classmethod
    def allowed(cls, name: str) -> str:
        """What a setting may be, in words: ``"a finite number, at least 0.05, at most 100"``."""
        kind, optional, rule = _fields(cls)[name]
        words = [_WORDS[kind]]
        if rule.choices or rule.forms:
            shown = (*rule.choices, *(form for form, _ in rule.forms))
            words = ["one of " + ", ".join(map(repr, shown))]
        for word, border in (
            ("at least", rule.low),
            ("above", rule.above),
            ("at most", rule.high),
            ("below", rule.below),
        ):
            if border is not None:
                words.append(f"{word} {_number(border)}")
        others = [*map(repr, rule.words), *(["None"] if optional else [])]
        return ", ".join(words) + (f" (or {' or '.join(others)})" if others else "")

    @classmethod
    def check(cls, name: str, value: Any) -> Any:
        """Return `value` as the setting `name` holds it, or raise SettingsError."""
        kind, optional, rule = _fields(cls)[name]
        if (optional and value is None) or (type(value) is str and value in rule.words):
            return value
        came, value = value, _widened(value, kind)
        fits = type(value) is kind and (kind is not float or math.isfinite(value))
        if fits and kind is str:
            fits = (
                bool(value.strip())
                and _is_writable(value)
                and (
                    not (rule.choices or rule.forms)
                    or value in rule.choices
                    or any(re.fullmatch(form, value) for _, form in rule.forms)
                )
            )
        elif fits and kind is not bool:
            fits = (
                (rule.low is None or value >= rule.low)
                and (rule.above is None or value > rule.above)
                and (rule.high is None or value <= rule.high)
                and (rule.below is None or value < rule.below)
            )
        if not fits:
            near = nearest(value, rule.choices or rule.words) if isinstance(value, str) else ""
            raise SettingsError(
                f"{name.upper()} is {came!r}, but must be {cls.allowed(name)}.{near}"
            )
        return value

    @classmethod
    def parse(cls, name: str, text: str) -> Any:
        """Return the value that `text`, a word of the command line, means for a setting."""
        kind, optional, rule = _fields(cls)[name]
        if optional and text.lower() == "none":
            return None
        if text.lower() in rule.words:
            return text.lower()
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        try:
            # A word that cannot be read is handed on as it is: `check` then says what is allowed.
            value = text if kind in (bool, str) else kind(text)
        except ValueError:
            value = text
        return cls.check(name, value)

    @classmethod
    def named(cls, name: str) -> str:
        """Return the field that `name` means in any case, with either dash or as an alias."""
        field = name.lower().replace("-", "_")
        field = cls.aliases.get(field, field)
        if field not in _fields(cls):
            hint = re.sub(r"--(\w+)", lambda flag: flag[1].upper(), cls.hint(field))
            raise SettingsError(f"There is no setting {name}.{hint}")
        return field

    @classmethod
    def of_all(cls, name: str, value: Any) -> Any:
        """Return the value of the setting that `name` means: for one per process, that of all.

        torchrun sets WORLD_SIZE, the number of processes, before any setting is read.
        """
        if name.lower().replace("-", "_") not in cls.per_process or type(value) is not int:
            return value
        world = os.environ.get("WORLD_SIZE", "")
        return value * (int(world) if world.isdecimal() else 1)

    @classmethod
    def hint(cls, field: str, more: typing.Iterable[str] = ()) -> str:
        """What to use in place of a name that is no setting, as flags, or nothing.

        Args:
            field: The name.
            more: Flags that it may have been meant to be, beside the settings.
        """
        if field in cls.instead:
            return f" {cls.instead[field]}"
        near = nearest(field, [*more, *_fields(cls), *cls.aliases], cls.aliases, "--{}".format)
        family = cls.instead.get(f"{field.partition('_')[0]}_*")
        return near or (f" {family}" if family else "")

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values under their fields' names; two names of one setting are refused."""
        names: dict[str, str] = {}
        for name in values:
            field = cls.named(name)
            if field in names:
                raise SettingsError(f"{names[field]} and {name} are the same setting: give one.")
            names[field] = name
        return {field: cls.of_all(name, values[name]) for field, name in names.items()}

    @classmethod
    def rules(cls) -> Mapping[str, tuple[type, bool, Rule]]:
        """Of each setting, in order: its plain type, whether it may be None, and its rule."""
        return _fields(cls)

    @classmethod
    def file_text(cls) -> str:
        """A settings file of the defaults, each under a comment; :meth:`from_file` reads it."""
        lines = [f'"""{cls.file_heading}"""']
        for name, (_, _, rule) in _fields(cls).items():
            if rule.section:
                lines += ["", f"# --- {rule.section} ".ljust(_WIDTH, "-"), ""]
            lines += textwrap.wrap(
                rule.comment,
                _WIDTH,
                initial_indent="# ",
                subsequent_indent="# ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines.append(f"{name.upper()} = {_literal(getattr(cls, name))}")
        return "\n".join(lines) + "\n"

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a file of UPPER_CASE literals; names it leaves out keep their defaults.

        The file is parsed, never executed.

        Raises:
            SettingsError: With file and line, for anything but `NAME = literal`; with the reason
                where the file cannot be read.
        """
        values = {}
        found = _read_literals(Path(path))
        for name, (line, value) in found.items():
            try:
                field = cls.named(name)
                values[field] = cls.of_all(name, cls.check(field, value))
            except SettingsError as error:
                raise SettingsError(f"{path}, line {line}: {error}") from None
        try:
            cls.canonical(found)
            return cls(**values)
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; names may be in either case, or aliases."""
        return cls(**cls.canonical(values))

    def to_dict(self) -> dict[str, Any]:
        """The settings under their UPPER_CASE names, ready for JSON."""
        return {name.upper(): getattr(self, name) for name in _fields(type(self))}

    def replace(self, **changes: Any) -> Self:
        """A checked copy with some settings changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class RunSettings(Settings):
    """What the settings of every mode have: where it computes, and the folder that it leaves."""

    # Settings that may differ between a run and its continuation: they do not change the result.
    free_on_resume: typing.ClassVar[frozenset[str]] = frozenset({"resume", "run_name", "runs_dir"})

    # The setting of its steps by which a finished run can be extended; None: none.
    extended_by: typing.ClassVar[str | None] = None

    aliases: typing.ClassVar[Mapping[str, str]] = ALIASES
    instead: typing.ClassVar[Mapping[str, str]] = INSTEAD

    device: str = setting(
        "auto",
        "where to compute: auto (a GPU if there is one) | cpu | cuda | cuda:N | mps",
        choices=("auto", "cpu", "cuda", "mps"),
        forms=(("cuda:N", r"cuda:\d+"),),
    )
    seed: int = setting(
        0,
        "seed of all random numbers",
        "On the CPU the same seed gives the same run.",
        low=0,
        high=2**32 - 1,
    )
    runs_dir: str = setting(
        "runs", "where every run creates a folder with its model, metrics and report"
    )
    run_name: str | None = setting(
        None,
        "name of this run's folder; None: the date and time",
        "A finished run is never overwritten.",
    )
    resume: bool = setting(False, "continue the last unfinished run, or the one named by RUN_NAME")

    def check_together(self) -> None:
        """Raise SettingsError where no folder can be called by the run's name."""
        if self.run_name is not None and self.run_name in (".", "..", "latest"):
            raise SettingsError(f"RUN_NAME is {self.run_name!r}, which no run may be called.")
        if self.run_name is not None and ("/" in self.run_name or "\\" in self.run_name):
            raise SettingsError(
                f"RUN_NAME is {self.run_name!r}, but must be a plain name inside RUNS_DIR."
            )


def _number(border: float) -> str:
    """A border of a range; large ones are written out."""
    return f"{border:g}" if abs(border) < 1e6 else f"{border}"


def _literal(value: Any) -> str:
    """The value as a person would write it: "text", 0.1, 1e-5, True, None."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return re.sub(r"e([-+])0", r"e\1", repr(value))


def _is_writable(text: str) -> bool:
    """Whether it can be a file's name, and stand in a file: no NUL, nothing but Unicode."""
    return "\0" not in text and text.encode("utf-8", "replace").decode() == text


def _widened(value: Any, kind: type) -> Any:
    """A whole number as a float where one is asked for; anything else as it came."""
    if kind is not float or type(value) is not int:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf


def nearest(
    word: str,
    known: typing.Iterable[str],
    aliases: Mapping[str, str] = types.MappingProxyType({}),
    shown: Callable[[str], str] = str,
) -> str:
    """``" Did you mean X?"`` for the known word most like this one, or nothing.

    A word that only one known word, no alias, begins with means that one.

    Args:
        word: What came.
        known: What it may have been meant to be.
        aliases: Known word -> the one to suggest in its place.
        shown: How a word is written.
    """
    words = list(dict.fromkeys(known))
    close = [name for name in words if len(word) > 2 and name.startswith(word)]
    close = [name for name in close if name not in aliases]
    if len(close) != 1:
        # Below three quarters alike, a word of the same ending would be taken for the same word.
        close = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
    return f" Did you mean {shown(aliases.get(close[0], close[0]))}?" if close else ""


def _read_literals(path: Path) -> dict[str, tuple[int, Any]]:
    """The top-level assignments of a file: name to line and value."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read as a settings file: {error.strerror}. Expected a file of"
            " `NAME = literal` lines; `ssl_kd config` prints one."
        ) from None
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SettingsError(f"{path} is UTF-16: save it as UTF-8.")
    try:
        body = ast.parse(content, filename=str(path)).body
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # the last two: too deep
        line = getattr(error, "lineno", None) or 1
        reason = getattr(error, "msg", None) or str(error) or "it is nested too deeply"
        raise SettingsError(f"{path}, line {line}: this is not Python: {reason}.") from None
    found: dict[str, tuple[int, Any]] = {}
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # the docstring
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            target = value = None
        if not isinstance(target, ast.Name) or value is None or not target.id.isupper():
            raise SettingsError(
                f"{path}, line {node.lineno}: only `NAME = literal`, NAME in UPPER_CASE, may stand"
                " here."
            )
        where = f"{path}, line {node.lineno}: {target.id}"
        if target.id in found:
            raise SettingsError(f"{where} was set before, on line {found[target.id][0]}.")
        try:
            found[target.id] = (node.lineno, ast.literal_eval(value))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            came = textwrap.shorten(
                ast.get_source_segment(content.decode("utf-8", "replace"), value) or "", 60
            )
            raise SettingsError(
                f"{where} must be a plain literal such as 0.1, 'text', True or None,"
                f" not `{came}`: this file is read, not run."
            ) from None
    return found
