"""Declare settings once, to be checked, documented, and read from a file and the command line.

A mode declares a frozen dataclass of :func:`setting` fields on top of :class:`Settings`. Its values
come from the defaults, a file of UPPER_CASE literals and the command line; the last one wins.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import inspect
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

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings.foreign_names import ALIASES, INSTEAD
from ssl_kd.core.settings.recipes import Recipe

_WIDTH = 100  # of a settings file
_KINDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text"}
_KINDS |= {dict: 'an object in JSON, as in {"name": true}'}


class SettingsError(InputError):
    """A setting is misspelt, of the wrong type or out of range; the message names it."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The documentation of a setting, and the values that it allows."""

    help: str  # one line on the effect of the setting, its unit, and the meaning of None
    more: str = ""  # sentences that only the settings file shows: when and why to change it
    section: str = ""  # title of the section of that file that begins here
    low: float | None = None
    above: float | None = None  # as `low`, excluded
    high: float | None = None
    below: float | None = None  # as `high`, excluded
    choices: tuple[str, ...] = ()
    forms: tuple[tuple[str, str], ...] = ()  # further choices: as shown, and as an expression
    known: tuple[str, ...] = ()  # further choices, which messages suggest but do not list
    words: tuple[str, ...] = ()  # alternatives to a number, from its type: int | Literal["auto"]
    number: bool = False  # of a text: a number stands for its text
    # Other settings, each with a pattern of those of its values with which this one has an effect.
    only_with: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def bounds(self) -> list[str]:
        """The allowed range in words, such as `["at least 0.05", "at most 100"]`."""
        borders = {"at least": self.low, "above": self.above, "at most": self.high}
        borders["below"] = self.below
        return [f"{word} {_number(b)}" for word, b in borders.items() if b is not None]

    def allows(self, value: Any) -> bool:
        """Return whether a value of the right type is in range or one of the choices."""
        if isinstance(value, str):
            matches = any(re.fullmatch(form, value) for _, form in self.forms)
            any_text = not self.choices and not self.forms
            is_choice = value in self.choices or value in self.known
            return _is_writable(value) and (any_text or is_choice or matches)
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )


def setting(default: Any, help: str, more: str = "", **rule: Any) -> Any:
    """Declare a setting: a dataclass field that carries its :class:`Rule`."""
    return dataclasses.field(default=default, metadata={"rule": Rule(help, more, **rule)})


@functools.cache
def _rules(cls: type) -> Mapping[str, tuple[type, bool, Rule]]:
    """Map each setting to its plain type, whether it may be None, and its rule."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    # A dataclass puts first what it inherits; here it comes last, as the section of every run.
    in_order = (name for base in cls.__mro__ for name in inspect.get_annotations(base))
    rules = {}
    for name in filter(fields.get, in_order):
        is_union = typing.get_origin(hints[name]) in (typing.Union, types.UnionType)
        members = typing.get_args(hints[name]) if is_union else (hints[name],)
        literals = [m for m in members if typing.get_origin(m) is typing.Literal]
        (kind,) = (m for m in members if m is not types.NoneType and m not in literals)
        rule = fields[name].metadata["rule"]
        if literals:
            rule = dataclasses.replace(rule, words=typing.get_args(literals[0]))
        rules[name] = (kind, types.NoneType in members, rule)
    return types.MappingProxyType(rules)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base class of the settings of a mode; checks every field on construction."""

    # Older and foreign names of settings: that name -> the setting's.
    aliases: typing.ClassVar[Mapping[str, str]] = {}

    # Aliases whose value counts for one process, where the setting counts for all of them.
    per_process: typing.ClassVar[frozenset[str]] = frozenset()

    # Foreign names without a setting, or `hub_*` for a family of them: that name -> a sentence with
    # the flags to use.
    instead: typing.ClassVar[Mapping[str, str]] = {}
    obsolete: typing.ClassVar[frozenset[str]] = frozenset()  # in files of older versions: ignored

    file_heading: typing.ClassVar[str] = ""  # what the settings file says at its top

    first: typing.ClassVar[tuple[str, ...]] = ()  # settings that --help shows; all of them if empty

    # What the setting `recipe` may name. In a settings object it is only a name; the readers of
    # files and flags fill in the recipe's values by `following`.
    recipes: typing.ClassVar[Mapping[str, Recipe]] = {}

    def __init_subclass__(cls) -> None:
        """Refuse a field whose name is also that of an alias or of a removed setting."""
        fields = {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
        if taken := sorted(fields & {*cls.aliases, *cls.instead, *cls.obsolete}):
            raise TypeError(
                f"{cls.__name__} declares {', '.join(taken)}, listed in `aliases`, `instead` or "
                "`obsolete`, so no value would reach the field: remove the name from that list"
            )

    def __post_init__(self) -> None:
        """Check every field, then the rules between fields."""
        for name in self.rules():
            # `check` turns a whole number into a float if the setting is a float.
            object.__setattr__(self, name, self.check(name, getattr(self, name)))
        for name, (_, _, rule) in self.rules().items():
            if getattr(self, name) != getattr(type(self), name):
                for other, pattern in rule.only_with.items():
                    self._check_effect(name, other, pattern)
        self.check_together()

    def _check_effect(self, name: str, other: str, pattern: str) -> None:
        """Raise SettingsError if a setting has no effect with the value of another one."""
        value = getattr(self, other)
        if re.fullmatch(pattern, value):
            return
        fitting = [
            choice for choice in self.rules()[other][2].choices if re.fullmatch(pattern, choice)
        ]
        raise SettingsError(
            f"{name.upper()} is {getattr(self, name)!r}, but has no effect with {other.upper()} "
            f"{value}: leave {name.upper()} at its default, {getattr(type(self), name)!r}, or set "
            f"{other.upper()} to {' or '.join(fitting)}"
        )

    def check_together(self) -> None:
        """Raise SettingsError if settings contradict each other."""

    @classmethod
    def rules(cls) -> Mapping[str, tuple[type, bool, Rule]]:
        """Map each setting, in order, to its plain type, whether it may be None, and its rule."""
        return _rules(cls)

    @classmethod
    def allowed(cls, name: str) -> str:
        """Describe the allowed values: ``"a finite number, at least 0.05 (or None)"``."""
        kind, optional, rule = cls.rules()[name]
        choices = (*rule.choices, *(form for form, _ in rule.forms))
        what = "one of " + ", ".join(map(repr, choices)) if choices else _KINDS[kind]
        what += " or a number" if rule.number else ""
        others = [*map(repr, rule.words), *(["None"] if optional else [])]
        return ", ".join([what, *rule.bounds]) + (f" (or {' or '.join(others)})" if others else "")

    @classmethod
    def check(cls, name: str, value: Any) -> Any:
        """Convert a value to the type of a setting; raise SettingsError if it is invalid."""
        kind, optional, rule = cls.rules()[name]
        if (optional and value is None) or (type(value) is str and value in rule.words):
            return value
        checked: Any = value
        if kind is float and type(value) is int:
            try:
                checked = float(value)
            except OverflowError:
                checked = math.inf
        if rule.number and type(value) in (int, float):
            checked = str(value)
        if type(checked) is kind and (kind is not float or math.isfinite(checked)):
            if kind is bool or rule.allows(checked):
                return checked
        known = (*rule.choices, *rule.known, *rule.words)
        hint = nearest(value, known) if isinstance(value, str) else ""
        raise SettingsError(f"{name.upper()} is {value!r}, but must be {cls.allowed(name)}.{hint}")

    @classmethod
    def parse(cls, name: str, text: str) -> Any:
        """Convert the text of a command-line flag to the value of a setting."""
        kind, optional, rule = cls.rules()[name]
        lower = text.lower()
        if optional and lower == "none":
            return None
        value: Any = text
        if lower in rule.words:
            value = lower
        elif kind is bool and lower in ("true", "false"):
            value = lower == "true"
        elif kind in (int, float, dict):
            with contextlib.suppress(ValueError):  # `check` says what is allowed
                value = json.loads(text) if kind is dict else typing.cast(Any, kind)(text)
        return cls.check(name, value)

    @classmethod
    def named(cls, name: str) -> str:
        """Return the field name of a setting given in upper or lower case, or by an alias."""
        field = name.lower().replace("-", "_")
        field = cls.aliases.get(field, field)
        if field not in cls.rules():
            hint = re.sub(r"--(\w+)", lambda flag: flag[1].upper(), cls.hint(field))
            hint = hint or " --help-all lists all settings."
            raise SettingsError(f"There is no setting {name}.{hint}")
        return field

    @classmethod
    def of_all(cls, name: str, value: Any) -> Any:
        """Return the value for all processes: the total if the name is that of a per-process value.

        The number of processes is WORLD_SIZE, which torchrun sets.
        """
        if name.lower().replace("-", "_") not in cls.per_process or type(value) is not int:
            return value
        world = os.environ.get("WORLD_SIZE", "")
        return value * (int(world) if world.isdecimal() else 1)

    @classmethod
    def hint(cls, field: str, more: typing.Iterable[str] = ()) -> str:
        """Return a sentence with the flag to use instead of an unknown name, or an empty string.

        `more` are known flags that are not settings.
        """
        if field in cls.instead:
            return f" {cls.instead[field]}"
        near = nearest(field, [*more, *cls.rules(), *cls.aliases], cls.aliases, "--{}".format)
        family = cls.instead.get(f"{field.partition('_')[0]}_*")
        return near or (f" {family}" if family else "")

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Replace aliases by the names of their settings; raise if a setting is given twice."""
        names: dict[str, str] = {}
        for name in values:
            field = cls.named(name)
            if field in names:
                raise SettingsError(
                    f"{names[field]} and {name} are the same setting: remove one of them."
                )
            names[field] = name
        return {field: cls.of_all(name, values[name]) for field, name in names.items()}

    @classmethod
    def following(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values, and those of the recipe that they name where they have none."""
        name = values.get("recipe")
        recipe = cls.recipes.get(name) if isinstance(name, str) else None
        return {**(recipe.values if recipe else {}), **values}

    def check_recipe(self, *commands: str) -> None:
        """Raise SettingsError if a recipe is not one of these commands, or needs another setting.

        Args:
            *commands: commands of `ssl_kd` that these settings are for, such as "train".
        """
        name = vars(self).get("recipe")
        if name is None:
            return
        recipe = self.recipes[name]
        if recipe.command not in commands:
            fitting = ", ".join(n for n, other in self.recipes.items() if other.command in commands)
            raise SettingsError(
                f"RECIPE is {name!r}, which is for ssl_kd {recipe.command}: run `ssl_kd"
                f" {recipe.command} --recipe {name}`, or choose one of {fitting}"
            )
        for needed, what in recipe.needs.items():
            if getattr(self, needed) == getattr(type(self), needed):
                raise SettingsError(
                    f"RECIPE {name!r} leaves {needed.upper()} to you: set --{needed} to {what}"
                )

    @classmethod
    def file_text(cls) -> str:
        """Return the text of a settings file with all defaults, each below its comment."""
        lines = [f'"""{cls.file_heading}"""']
        for name, (_, _, rule) in cls.rules().items():
            if rule.section:
                lines += ["", f"# --- {rule.section} ".ljust(_WIDTH, "-"), ""]
            what, semicolon, rest = rule.help.partition(";")
            what = ", ".join([f"{what[0].upper()}{what[1:]}", *rule.bounds])
            comment = textwrap.fill(
                f"{what}{semicolon}{rest}. {rule.more}".rstrip(),
                _WIDTH - 2,
                break_long_words=False,
                break_on_hyphens=False,
            )
            default = getattr(cls, name)
            if isinstance(default, str):
                literal = json.dumps(default, ensure_ascii=False)
            else:
                literal = re.sub(r"e([-+])0", r"e\1", repr(default))  # 1e-5, not 1e-05
            lines += [textwrap.indent(comment, "# "), f"{name.upper()} = {literal}"]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read settings from a file of UPPER_CASE literals; missing ones keep their defaults.

        The file is parsed, never executed.
        """
        assigned = _read_literals(Path(path))
        for name, (line, value) in assigned.items():
            try:
                cls.check(cls.named(name), value)
            except SettingsError as error:
                raise SettingsError(f"{path}, line {line}: {error}") from None
        try:
            return cls.from_dict({name: value for name, (_, value) in assigned.items()})
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create settings from values by name, in either case, or by alias; skip obsolete names.

        A value that is not there is that of the recipe that RECIPE names, or else the default.
        """
        known = cls.canonical({n: v for n, v in values.items() if n not in cls.obsolete})
        return cls(**cls.following(known))

    def to_dict(self) -> dict[str, Any]:
        """Return the values by UPPER_CASE names; all of them can be written as JSON."""
        return {name.upper(): getattr(self, name) for name in self.rules()}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some settings changed; it is checked like any new object."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class RunSettings(Settings):
    """The settings that all modes share: the device, the seed and the run folder."""

    # Settings that may differ between a run and its continuation: they do not change the result.
    free_on_resume: typing.ClassVar[frozenset[str]] = frozenset(
        {"clear_cache_every_step", "report_to", "resume", "run_name", "runs_dir"}
    )

    # Settings whose value `auto` a run replaces in its config.json by what it has chosen.
    chosen_by_run: typing.ClassVar[frozenset[str]] = frozenset()

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
    report_to: str = setting(
        "auto",
        "where to log curves in addition to metrics.jsonl: auto (tensorboard if it is installed) |"
        " none | tensorboard (files in the run folder) | wandb | trackio | mlflow (packages to"
        " install)",
        choices=("auto", "none", "tensorboard", "wandb", "trackio", "mlflow"),
    )
    clear_cache_every_step: bool = setting(
        False,
        "return the device's cached memory after every step, which takes time; no effect on a CPU",
        "The first log lines say what else helps if memory runs out.",
    )

    @property
    def boards(self) -> set[str]:
        """The board that REPORT_TO names, as a set; empty for `none`."""
        if self.report_to == "auto":
            return {"tensorboard"} if importlib.util.find_spec("tensorboard") else set()
        return {self.report_to} - {"none"}

    def agrees(self, name: str, saved: Any) -> bool:
        """Return whether a setting has the value of a run, or leaves the choice to the run."""
        value = getattr(self, name)
        return value == saved or (name in self.chosen_by_run and value == "auto")

    def with_choices(self, saved: Mapping[str, Any]) -> Self:
        """Return the settings with what a run has chosen instead of `auto`.

        `saved` are the settings in `config.json` of that run, by UPPER_CASE names.
        """
        chosen = {n: saved[n.upper()] for n in self.chosen_by_run if getattr(self, n) == "auto"}
        return self.replace(**chosen)

    def check_together(self) -> None:
        """Raise SettingsError if RUN_NAME cannot be the name of a folder in RUNS_DIR."""
        name = self.run_name or ""
        if name in (".", "..", "latest") or "/" in name or "\\" in name:
            raise SettingsError(
                f"RUN_NAME is {name!r}, but must be a name without slashes, and not '.', '..' or"
                " 'latest': the run folder is created in RUNS_DIR."
            )


def _number(border: float) -> str:
    return f"{border:g}" if abs(border) < 1e6 else f"{border}"


def _is_writable(text: str) -> bool:
    """Return whether a text is valid Unicode without NUL, and not blank."""
    valid = text.encode("utf-8", "replace").decode() == text
    return bool(text.strip()) and "\0" not in text and valid


def nearest(
    word: str,
    known: typing.Iterable[str],
    aliases: Mapping[str, str] = types.MappingProxyType({}),
    shown: Callable[[str], str] = str,
) -> str:
    """Return ``" Did you mean X?"`` with the known word closest to `word`, or an empty string.

    If exactly one known word begins with `word`, that one is suggested. `aliases` map known words
    to the words to suggest instead, and `shown` formats the suggestion.
    """
    words = list(dict.fromkeys(known))
    close = [name for name in words if len(word) > 2 and name.startswith(word)]
    close = [name for name in close if name not in aliases]
    if len(close) != 1:
        # With a lower cutoff, a common ending would be enough.
        close = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
    return f" Did you mean {shown(aliases.get(close[0], close[0]))}?" if close else ""


def _read_literals(path: Path) -> dict[str, tuple[int, Any]]:
    """Parse a settings file into name -> (line, value)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read as a settings file: {error.strerror}. Expected lines of"
            " `NAME = literal`; `ssl_kd config train` prints such a file."
        ) from None
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SettingsError(f"{path} is UTF-16, expected UTF-8: save it as UTF-8.")
    too_deep = (RecursionError, MemoryError)
    try:
        body = ast.parse(content, filename=str(path)).body
    except (SyntaxError, ValueError, *too_deep) as error:
        line = getattr(error, "lineno", None) or 1
        reason = getattr(error, "msg", None) or str(error) or "it is nested too deeply"
        raise SettingsError(f"{path}, line {line}: this is not valid Python: {reason}.") from None
    literals: dict[str, tuple[int, Any]] = {}
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # the docstring
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        name, value = getattr(targets[0], "id", ""), getattr(node, "value", None)
        is_assignment = isinstance(node, ast.Assign | ast.AnnAssign)
        if not is_assignment or value is None or len(targets) > 1 or not name.isupper():
            raise SettingsError(
                f"{path}, line {node.lineno}: expected only lines of `NAME = literal`, with NAME in"
                " UPPER_CASE."
            )
        where = f"{path}, line {node.lineno}: {name}"
        if name in literals:
            raise SettingsError(
                f"{where} was set before, on line {literals[name][0]}: remove one of the lines."
            )
        try:
            literals[name] = (node.lineno, ast.literal_eval(value))
        except (ValueError, TypeError, SyntaxError, *too_deep):
            source = ast.get_source_segment(content.decode("utf-8", "replace"), value) or ""
            raise SettingsError(
                f"{where} must be a plain literal such as 0.1, 'text', True or None,"
                f" not `{textwrap.shorten(source, 60)}`: a settings file is not executed."
            ) from None
    return literals
