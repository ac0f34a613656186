"""Read settings from the command line; flags beat a preset, which beats the settings file."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from ssl_kd.core.settings import Settings, SettingsError, nearest

S = TypeVar("S", bound=Settings)
LANGUAGE_CONFIG = Path("scripts/config.py")


class FlagParser(argparse.ArgumentParser):
    """An argparse parser that raises SettingsError on errors, and treats `--a-b` as `--a_b`.

    Help and messages show its flags with underscores, as the documentation does.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raise the message as SettingsError instead of printing it and exiting."""
        raise SettingsError(f"{self._as_shown(message)}; --help lists all flags")

    def format_help(self) -> str:
        """Return the help text."""
        return self._as_shown(super().format_help())

    def _as_shown(self, text: str) -> str:
        """Return a text with underscores in this parser's own flags."""
        flags = {flag for action in self._actions for flag in action.option_strings}

        def shown(match: re.Match[str]) -> str:
            name = match[0].removeprefix("--")
            return f"--{name.replace('-', '_')}" if match[0] in flags else match[0]

        return re.sub(r"--[a-z][a-z0-9-]*", shown, text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does; return unknown arguments as they were typed."""
        typed = {hyphenated(arg): arg for arg in args}
        known, unknown = super().parse_known_args(list(map(hyphenated, args)), namespace)
        return known, [typed.get(arg, arg) for arg in unknown]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments; raise SettingsError with the first unknown one."""
        if invalid := next((arg for arg in args if "\0" in arg), None):
            raise SettingsError(f"The argument {invalid!r} contains a NUL character: remove it.")
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            hint = nearest(hyphenated(unknown[0]), flags) or f" {self.prog} --help lists all flags."
            raise SettingsError(f"There is no flag {unknown[0]}.{self._as_shown(hint)}")
        return known


def hyphenated(arg: str) -> str:
    """Replace `_` by `-` in the name of a flag; leave other arguments unchanged."""
    flag, equals, value = arg.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if arg.startswith("--") else arg


def integer_from(low: int) -> Callable[[str], int]:
    """Return an argparse type that accepts integers of at least `low`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < low:
            raise argparse.ArgumentTypeError(f"expected a whole number, at least {low}, got {text}")
        return int(text)

    return parse


def read_settings(cls: type[S], argv: Sequence[str], config: Path, **options: Any) -> S:
    """Return the settings from defaults, file and flags (see `resolve_settings`)."""
    return resolve_settings(cls, argv, config, **options)[0]


def resolve_settings(
    cls: type[S],
    argv: Sequence[str],
    config: Path,
    *,
    prog: str,
    presets: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    preset: str | None = None,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> tuple[S, dict[str, Any]]:
    """Resolve settings: defaults, then the file, then the preset or recipe, then the flags.

    Return the settings, and the values that came from preset, recipe and flags. The file `config`
    may be missing. `presets` are the settings that each preset changes; the first process prints
    the note of a preset that has one.
    """
    show_all = not cls.first or "--help-all" in map(hyphenated, argv)
    parser = _settings_parser(cls, config, prog, presets, preset, show_all)
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        raise SettingsError(_unknown(cls, unknown[0], ["config", *(["preset"] if presets else [])]))
    values = vars(parsed)
    file, preset = values.pop("config", None), values.pop("preset", preset)
    if preset is not None:
        if preset not in presets:
            known = ", ".join(presets)
            raise SettingsError(
                f"--preset is {preset!r}; expected one of {known}.{nearest(preset, presets)}"
            )
        if "recipe" in values:
            raise SettingsError(
                f"--recipe is {values['recipe']!r}, and the preset is {preset!r}; expected one of"
                " them: leave out --preset, or use scripts/distill.py, which has no preset of its"
                " own"
            )
        values = {**presets[preset], **values}
    values = cls.following(values)
    if file is None and not os.path.lexists(config):  # a broken link is an error
        resolved = cls(**values)
    else:
        config = config if file is None else Path(file)
        in_file = cls.from_file(config)
        named = vars(in_file).get("recipe")
        if "recipe" in values and named not in (None, values["recipe"]):
            raise SettingsError(
                f"--recipe is {values['recipe']!r}, and RECIPE in {config} is {named!r}; expected"
                " one of them: remove one"
            )
        resolved = in_file.replace(**values)
    if preset is not None and preset in notes and os.environ.get("RANK", "0") == "0":
        print(f"ssl_kd: preset {preset}: {notes[preset]}", file=sys.stderr)
    return resolved, values


class _StoreSetting(argparse.Action):
    """Converts and checks the value of a flag as its setting does, and stores it."""

    def __init__(self, cls: type[Settings], names: dict[str, str], **options: Any) -> None:
        super().__init__(**options)
        self.cls, self.names = cls, names  # setting -> the name it was given by

    def __call__(self, parser: Any, namespace: Any, values: Any, flag: str | None = None) -> None:
        switched_off = self.nargs == 0  # by --no-NAME
        name = str(flag).removeprefix("--no-" if switched_off else "--").replace("-", "_")
        used = self.names.setdefault(self.dest, name)
        if used != name:
            raise SettingsError(f"--{used} and --{name} are the same setting: remove one of them.")
        value = self.cls.parse(self.dest, "False" if switched_off else values)
        setattr(namespace, self.dest, self.cls.of_all(name, value))


def _settings_parser(
    cls: type[Settings],
    config: Path,
    prog: str,
    presets: Mapping[str, Any],
    preset: str | None,
    show_all: bool,
) -> FlagParser:
    """Return a parser with a flag for each setting; `--help` shows only those in `cls.first`."""
    more = f"{len(cls.rules()) - len(cls.first)} more settings are flags, too: {prog} --help_all"
    parser = FlagParser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=f"Every setting of {config.name} as a flag; a flag beats the file.",
        epilog=None if show_all else f"{more} lists them.",
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    about = "show the most used settings; --help_all shows all"
    parser.add_argument("-h", "--help", "--help-all", action="help", help=about)
    parser.add_argument("--config", metavar="FILE", help=f"file of settings (default: {config})")
    if presets:
        about = f"settings that go together (default: {preset}; one of {', '.join(presets)})"
        parser.add_argument("--preset", metavar="NAME", help=about)
    names: dict[str, str] = {}
    group: Any = parser if show_all else parser.add_argument_group("most used settings")
    ordered = cls.rules() if show_all else dict.fromkeys((*cls.first, *cls.rules()))
    for name in ordered:
        kind, _, rule = cls.rules()[name]
        if rule.section and show_all:
            group = parser.add_argument_group(rule.section)
        aliases = [alias for alias, field in cls.aliases.items() if field == name]
        help = f"{rule.help} (default: {getattr(cls, name)}"
        unnamed = [choice for choice in rule.choices if choice not in rule.help]
        help += f"; {cls.allowed(name)})" if rule.bounds or unnamed else ")"
        per_process = [alias for alias in aliases if alias in cls.per_process]
        help += "".join(f" --{alias} is per process" for alias in per_process)
        flags = [f"--{flag.replace('_', '-')}" for flag in (name, *aliases)]
        if show_all and aliases:
            help += " Also: " + ", ".join(f"--{alias}" for alias in aliases)
        help = help.replace("%", "%%") if show_all or name in cls.first else argparse.SUPPRESS
        store = partial(_StoreSetting, cls, names)
        if kind is bool:
            # As transformers' HfArgumentParser: --resume, --resume False and --no-resume.
            form = {"nargs": "?", "const": "True", "metavar": "False"}
            off = [f"--no-{flag[2:]}" for flag in flags]
            group.add_argument(*off, dest=name, action=store, nargs=0, help=argparse.SUPPRESS)
        else:
            # The text is parsed by `Settings`, which decides what is allowed in files, too.
            form = {"metavar": kind.__name__.upper()}
        group.add_argument(flags[0], action=store, help=help, **form)
        for flag in flags[1:]:
            hidden = {"dest": name, "help": argparse.SUPPRESS}
            group.add_argument(flag, action=store, **hidden, **form)
    return parser


def _unknown(cls: type[Settings], arg: str, others: Sequence[str]) -> str:
    """Return the error message for an argument that is not a flag or a value of one."""
    if not arg.startswith("-"):
        return (
            f"The argument {arg!r} belongs to no flag. A flag takes one value; an on/off flag takes"
            " none, or True or False."
        )
    name = arg.lstrip("-").partition("=")[0].replace("-", "_").lower()
    known = [*others, *cls.rules()]
    known += [f"no_{flag}" for flag, (kind, *_) in cls.rules().items() if kind is bool]
    if name in known:  # right but for its capitals, or a single dash
        return f"There is no flag {arg}. Did you mean --{name}?"
    return f"There is no flag {arg}.{cls.hint(name, known) or ' --help lists all flags.'}"
