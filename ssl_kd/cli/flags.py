"""Settings from the command line: flags over a preset over the settings file over the defaults."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from ssl_kd.errors import InputError
from ssl_kd.settings import Settings, SettingsError, nearest

S = TypeVar("S", bound=Settings)
LANGUAGE_CONFIG = Path("scripts/config.py")


class _Help(argparse.HelpFormatter):
    """Shows a flag's one value as such: `--seed INT`, not `--seed [INT ...]`."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "*":
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


class FlagParser(argparse.ArgumentParser):
    """A parser whose complaints are one line each: it raises SettingsError and never exits."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below the usage."""
        raise SettingsError(f"{message}; --help lists all flags")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse, with `_` or `-` in a flag; what it does not know comes back as it was."""
        spelt = {hyphenated(word): word for word in args}
        known, unknown = super().parse_known_args(list(map(hyphenated, args)), namespace)
        return known, [spelt.get(word, word) for word in unknown]


def hyphenated(word: str) -> str:
    """A word of the command line, with `-` in place of `_` where it is a flag."""
    flag, equals, value = word.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def check_first(argv: Sequence[str], prog: str, what: str) -> None:
    """Of a command that takes something first, as `ssl_kd judge STUDENT`: it came.

    Raises:
        InputError: a flag came in its place.
    """
    if argv[0].startswith("-"):
        name = prog.split()[-1]
        raise InputError(
            f"{name} takes {what} first, and {argv[0]} came: {prog} runs/latest {argv[0]} ..."
        )


def flags_after(
    argv: Sequence[str],
    prog: str,
    what: str,
    flags: Iterable[str],
    switches: Iterable[str] = (),
    numbers: Collection[str] = (),
) -> tuple[argparse.Namespace, list[str]]:
    """The flags of a command that takes something first, and the words that are none of them.

    Args:
        argv: all words.
        prog: the command.
        what: it takes first.
        flags: names of those with a value.
        switches: names of those without.
        numbers: those of `flags` whose value is a whole number.

    Raises:
        InputError: a flag came first; SettingsError: an invalid value.
    """
    check_first(argv, prog, what)
    parser = FlagParser(add_help=False, allow_abbrev=False)
    for name in flags:
        kind = int if name in numbers else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    for name in switches:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    if odd := next((word for word in argv if "\0" in word), None):
        raise InputError(f"{odd!r} holds a NUL, which no path or name can")
    return parser.parse_known_args(argv[1:])


def listed(flags: Mapping[str, str], switches: Mapping[str, str] = MappingProxyType({})) -> str:
    """What `--help` says of flags with a value, and of those without."""
    lines = [f"  --{name} {name.upper()}\n      {of}" for name, of in flags.items()]
    lines += [f"  --{name}\n      {of}" for name, of in switches.items()]
    return "\n".join(lines)


def read_settings(
    cls: type[S],
    argv: Sequence[str],
    config: Path,
    *,
    prog: str,
    presets: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    preset: str | None = None,
    notes: Mapping[str, str] = MappingProxyType({}),
    derive: Callable[[S, Mapping[str, Any]], S] = lambda settings, given: settings,
) -> S:
    """Resolve settings: defaults, then the file, then the preset, then the flags.

    Args:
        cls: The settings class.
        argv: The flags; `--learning_rate 1`, `--learning-rate 1` and `--learning_rate=1` are one.
        config: The settings file where no `--config` is given; it may be missing.
        prog: What `--help` calls the program.
        presets: Name -> the settings that it changes, for `--preset`.
        preset: The preset where no `--preset` is given.
        notes: Preset -> a line that the first process prints where that preset is used.
        derive: Gets these settings, and those that flags gave; what it returns is returned.

    Raises:
        SettingsError: Names what is misspelt, mistyped or out of range, and what is allowed.
        SystemExit: With code 0, after `--help` or `--help-all`.
    """
    hidden = [name for name in cls.rules() if cls.first and name not in cls.first]
    hidden = [] if "--help-all" in map(hyphenated, argv) else hidden
    more = f"{len(hidden)} more settings are flags, too: {prog} --help-all lists them."
    parser = FlagParser(
        prog=prog,
        usage=f"{prog} [flags]",
        formatter_class=_Help,
        description=f"Every setting of {config.name} as a flag; a flag beats the file.",
        epilog=more if hidden else None,
        allow_abbrev=False,
        add_help=False,
    )
    help = "the settings that most runs change; --help-all: all settings"
    parser.add_argument("-h", "--help", "--help-all", action="help", help=help)
    extra = {"config": f"file of settings (default: {config})"}
    if presets:
        listed = ", ".join(presets)
        extra["preset"] = f"settings that go together (default: {preset}; one of {listed})"
    for name, help in extra.items():
        parser.add_argument(f"--{name}", nargs="*", metavar="STR", help=help.replace("%", "%%"))
    _add_flags(parser, cls, hidden)
    values = _given(parser, cls, argv, tuple(extra))
    file, preset = values.pop("config", None), values.pop("preset", preset)
    if preset is not None:
        if preset not in presets:
            listed = ", ".join(presets)
            raise SettingsError(f"PRESET is {preset!r}, not {listed}.{nearest(preset, presets)}")
        values = {**presets[preset], **values}
    if file is None and not os.path.lexists(config):  # a broken link is no missing file
        settings = derive(cls(**values), values)
    else:
        settings = derive(cls.from_file(config if file is None else file).replace(**values), values)
    if preset is not None and preset in notes and os.environ.get("RANK", "0") == "0":
        print(f"ssl_kd: preset {preset}: {notes[preset]}", file=sys.stderr)
    return settings


def _add_flags(parser: argparse.ArgumentParser, cls: type[Settings], hidden: list[str]) -> None:
    """Add a flag for each setting, in the sections of the settings file where none is hidden."""
    group: Any = parser.add_argument_group("what most runs set") if hidden else parser
    for name in [*cls.first, *hidden] if hidden else cls.rules():
        kind, _, rule = cls.rules()[name]
        if rule.section and not hidden:
            group = parser.add_argument_group(rule.section)
        help = f"{rule.help} (default: {getattr(cls, name)}"
        help += f"; {cls.allowed(name)})" if rule.bounded else ")"
        others = [f"--{alias}" for alias, field in cls.aliases.items() if field == name]
        others = [o + " (per process)" * (o[2:] in cls.per_process) for o in others]
        help += f" Also: {', '.join(others)}" if others else ""
        help = argparse.SUPPRESS if name in hidden else help.replace("%", "%%")
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            # As transformers' HfArgumentParser: --resume, --resume False and --no-resume.
            group.add_argument(flag, nargs="?", const="True", metavar="False", help=help)
            no = {"dest": name, "const": "False", "help": argparse.SUPPRESS}
            group.add_argument(f"--no-{flag[2:]}", action="store_const", **no)
        else:
            # Words stay words here, any number of them: what they mean and what is allowed is
            # decided by `Settings`, in one place for file and flags.
            group.add_argument(flag, nargs="*", metavar=kind.__name__.upper(), help=help)


def _given(
    parser: argparse.ArgumentParser, cls: type[Settings], argv: Sequence[str], extra: Sequence[str]
) -> dict[str, Any]:
    """Return the checked value of each flag that came."""
    spelt: dict[str, str] = {}  # flag as the parser knows it -> as it came
    names: dict[str, str] = {}  # setting -> the name that it came under
    flags = []
    for word in argv:
        flags.append(word)
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            plain = name.removeprefix("no_")
            field = name.removesuffix(plain) + cls.aliases.get(plain, plain)
            if names.setdefault(field, name) != name:
                raise SettingsError(
                    f"--{names[field]} and --{name} are the same setting: give one of them."
                )
            flags[-1] = f"--{field}{equals}{value}"
        spelt[flags[-1]] = word
    parsed, unknown = parser.parse_known_args(flags)
    if unknown:
        raise SettingsError(_unknown(cls, spelt[unknown[0]], extra))
    given: dict[str, Any] = {}
    for name, texts in vars(parsed).items():
        if isinstance(texts, list) and len(texts) != 1:
            allowed = {"config": "a file", "preset": "a name"}.get(name) or cls.allowed(name)
            came = f"{' '.join(texts)!r}" if texts else "nothing"
            raise SettingsError(f"--{name} takes one value, {allowed}; {came} came after it.")
        if texts is not None:
            text = texts[0] if isinstance(texts, list) else texts
            given[name] = text if name in extra else cls.parse(name, text)
            given[name] = cls.of_all(names.get(name, name), given[name])
    return given


def _unknown(cls: type[Settings], word: str, extra: Sequence[str]) -> str:
    """The message about a word that no flag takes."""
    if not word.startswith("-"):
        return (
            f"{word!r} is the value of no flag. A flag takes one value; an on/off flag takes none,"
            " or True or False."
        )
    name = word.lstrip("-").partition("=")[0].replace("-", "_").lower()
    known = [*extra, *cls.rules()]
    known += [f"no_{flag}" for flag, (kind, *_) in cls.rules().items() if kind is bool]
    if name in known:  # right but for its capitals, or a single dash
        return f"There is no flag {word}. Did you mean --{name}?"
    return f"There is no flag {word}.{cls.hint(name, known) or ' --help lists all flags.'}"
