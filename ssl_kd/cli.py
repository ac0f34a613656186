"""The command line: settings in, a run folder and a screenful out, one line per known failure."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar

from ssl_kd import __version__
from ssl_kd.settings import Settings, SettingsError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from ssl_kd.language.settings import LanguageSettings

# Exit codes. What a signal ends is 128 + its number: 130 after Ctrl-C, 143 after SIGTERM.
OK, FAILED, BAD_SETTING, GUARD_STOPPED = 0, 1, 2, 3

_CODES = {
    "SettingsError": BAD_SETTING,
    "DatasetUnavailable": BAD_SETTING,  # DATASET names what is not there: misspelt, as a rule
    "TooFewHealthyParts": GUARD_STOPPED,
}

LANGUAGE_CONFIG = Path("scripts/config.py")

S = TypeVar("S", bound=Settings)


def main(argv: Sequence[str] | None = None) -> int:
    """`ssl_kd train | distill | doctor ...`: run one command and return its exit code.

    Args:
        argv: The words after the program's name; None: this process's own.
    """
    if argv is None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `python train.py` has it: that is where heads/ is
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else "--help"
    if command in ("-h", "--help"):
        lines = [f"  ssl_kd {name:<14} {does.__doc__}" for name, does in _COMMANDS.items()]
        print("usage: ssl_kd COMMAND [flags]\n\n" + "\n".join(lines))
        return OK
    if command == "--version":
        print(__version__)
        return OK
    if command not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        _say(f"There is no command {command!r}, only {known}.{nearest(command, _COMMANDS)}")
        return BAD_SETTING
    return _COMMANDS[command](words)


def train(argv: Sequence[str], *, config: Path = Path("config.py"), prog: str = "train.py") -> int:
    """Embed, train, judge and report, as `config.py` and the flags say; return the exit code.

    Args:
        argv: The flags.
        config: The settings file where no `--config` is given; it may be missing.
        prog: What `--help` calls the program.
    """
    return guarded(lambda: _train(argv, config, prog), shlex.join([*_program(prog), *argv]))


def _program(prog: str) -> list[str]:
    # This very interpreter: another one named python may lack the packages.
    return [sys.orig_argv[0], prog] if prog.endswith(".py") else prog.split()


def distill(
    argv: Sequence[str],
    *,
    preset: str | None = None,
    config: Path = LANGUAGE_CONFIG,
    prog: str = "distill.py",
) -> int:
    """Distil a language model, as the preset and the flags say; return the exit code.

    Args:
        argv: The flags.
        preset: The preset where no `--preset` is given.
        config: The settings file where no `--config` is given; it may be missing.
        prog: What `--help` calls the program.
    """
    from ssl_kd.language.settings import PRESETS, LanguageSettings

    def read() -> LanguageSettings:
        return read_settings(
            LanguageSettings, argv, config, prog=prog, presets=PRESETS, preset=preset
        )

    return distill_as(read, [*_program(prog), *argv])


def cache_teacher(
    argv: Sequence[str],
    *,
    config: Path = LANGUAGE_CONFIG,
    prog: str = "cache_teacher.py",
) -> int:
    """Keep what a teacher says of a text, for runs without it; return the exit code.

    Args:
        argv: The flags, those of `distill`.
        config: The settings file where no `--config` is given; it may be missing.
        prog: What `--help` calls the program.
    """
    from ssl_kd.language.settings import PRESETS, LanguageSettings

    def work() -> int:
        settings = read_settings(LanguageSettings, argv, config, prog=prog, presets=PRESETS)
        screen = _screen()
        from ssl_kd.language.task import cache_teacher

        with Progress(screen) as progress:
            caches = cache_teacher(settings, progress=progress)
        for cache in caches:
            facts = ", ".join(f"{name} {_short(value)}" for name, value in cache.facts().items())
            print(f"{cache.folder}: {facts}")
        return OK

    return guarded(work, shlex.join([*_program(prog), *argv]))


def distill_as(read: Callable[[], LanguageSettings], words: Sequence[str]) -> int:
    """Distil a language model and say what came of it; return the exit code.

    Args:
        read: Resolves the settings; what it raises is said in one line.
        words: The command that started it, which with `--resume` goes on.
    """
    return guarded(lambda: _distill(read()), shlex.join(words))


def read_settings(
    cls: type[S],
    argv: Sequence[str],
    config: Path,
    *,
    prog: str,
    presets: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    preset: str | None = None,
) -> S:
    """Resolve settings: defaults, then the file, then the preset, then the flags.

    Args:
        cls: The settings class.
        argv: The flags; `--learning_rate 1`, `--learning-rate 1` and `--learning_rate=1` are one.
        config: The settings file where no `--config` is given; it may be missing.
        prog: What `--help` calls the program.
        presets: Name -> the settings that it changes, for `--preset`.
        preset: The preset where no `--preset` is given.

    Raises:
        SettingsError: Names what is misspelt, mistyped or out of range, and what is allowed.
        SystemExit: With code 0, after `--help`.
    """
    import tyro

    def flag(name: str, kind: type, help: str, hint: str) -> Any:
        # Words stay words here, any number of them: what they mean and what is allowed is decided
        # by `Settings`, in one place for file and flags, and refused in one kind of message.
        words = tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar=kind.__name__.upper(),
            instance_from_str=list,
            is_instance=lambda value: isinstance(value, list),
            str_from_instance=list,
        )
        about = tyro.conf.arg(help=help.replace("%", "%%"), help_behavior_hint=hint)
        return Annotated[bool, about] if kind is bool else Annotated[list, words, about]

    flags = {"config": flag("config", str, "file of settings", f"(default: {config})")}
    if presets:
        choices = f"(default: {preset}; one of {', '.join(presets)})"
        flags["preset"] = flag("preset", str, "settings that go together", choices)
    for name, (kind, _, rule) in cls.rules().items():
        default = getattr(cls, name)
        allowed = f"; {cls.allowed(name)}" if rule.bounded else ""
        flags[name] = flag(name, kind, rule.help, f"(default: {default}{allowed})")
    given: dict[str, Any]
    given, unknown = tyro.cli(
        TypedDict("Flags", flags, total=False),  # pyright: ignore
        prog=prog,
        description=f"Every setting of {config.name} as a flag; a flag beats the file.",
        args=_canonical(cls, argv),
        return_unknown_args=True,
    )
    if unknown:
        raise SettingsError(_unknown(cls, unknown[0], [*flags]))

    values = {}
    for name, words in given.items():
        if isinstance(words, bool):
            values[name] = words
        elif len(words) != 1:
            allowed = {"config": "a file", "preset": "a name"}.get(name) or cls.allowed(name)
            came = f"{' '.join(words)!r}" if words else "nothing"
            raise SettingsError(f"--{name} takes one value, {allowed}; {came} came after it.")
        elif name == "preset":
            preset = words[0]
        elif name != "config":
            values[name] = cls.parse(name, words[0])
    if preset is not None:
        if preset not in presets:
            listed = ", ".join(presets)
            raise SettingsError(f"PRESET is {preset!r}, not {listed}.{nearest(preset, presets)}")
        values = {**presets[preset], **values}
    if "config" in given:
        file = Path(given["config"][0])
        if not file.is_file():
            raise SettingsError(f"There is no settings file {file} (--config).")
        return cls.from_file(file).replace(**values)
    return (cls.from_file(config) if config.is_file() else cls()).replace(**values)


def _canonical(cls: type[Settings], argv: Sequence[str]) -> list[str]:
    """The flags, each alias in place of the setting's name; two names of one are refused."""
    words, names = [], {}
    for word in argv:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        field = cls.aliases.get(name, name)
        if field and names.setdefault(field, name) != name:
            raise SettingsError(f"--{names[field]} and --{name} are one setting: give one of them.")
        words.append(f"--{field}{equals}{value}" if field != name else word)
    return words


def _unknown(cls: type[Settings], word: str, flags: Sequence[str]) -> str:
    if not word.startswith("-"):
        return (
            f"{word!r} belongs to no flag. A flag takes one value; one that is on or off takes"
            " none: --resume, --no-resume."
        )
    name = word.lstrip("-").partition("=")[0].replace("-", "_").lower()
    known = list(flags)
    known += [f"no_{flag}" for flag, (kind, *_) in cls.rules().items() if kind is bool]
    if name in known:  # right but for its capitals, or a single dash
        return f"There is no flag {word}. Did you mean --{name}?"
    hint = nearest(name, [*known, *cls.aliases], cls.aliases, "--{}".format)
    return f"There is no flag {word}.{hint or ' --help lists all flags.'}"


def _train(argv: Sequence[str], config: Path, prog: str) -> int:
    from ssl_kd.vision.settings import VisionSettings

    settings = read_settings(VisionSettings, argv, config, prog=prog)

    from rich.console import Console

    screen = _screen()
    from ssl_kd.report import run_images, write_report
    from ssl_kd.report.tables import results_table
    from ssl_kd.training.folder import RunFinished
    from ssl_kd.training.stop import Interrupted
    from ssl_kd.vision.run import run

    with Progress(screen) as progress:
        try:
            done = run(settings, progress=progress)
            path, images = done.path, done.images
        except RunFinished as ended:  # all but the report, perhaps
            if (ended.path / "report.html").exists():
                raise
            path, images = ended.path, run_images(ended.path)
        progress("report", 0, 1, {})
        try:
            report = write_report(path, images=images)
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, path) from None
        progress("report", 1, 1, {})
    out = Console()
    metrics = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
    if any(row.get("acc") is not None for row in metrics["table"]):
        out.print(results_table(metrics))
    else:
        sizes = metrics["cluster_sizes"]
        found = f"{len(sizes)} clusters of {min(sizes)} to {max(sizes)} samples"
        out.print(f"{found}; no label is known, so there is nothing to score.")
    # soft_wrap: a path broken over two lines cannot be clicked or copied.
    files = {"Clusters": path / "assignments.csv", "Report": report}
    if (path / "faults").exists():
        files["Faults, each explained by ssl_kd replay FILE"] = path / "faults"
    for name, file in files.items():
        out.print(f"{name}: {file}", soft_wrap=True, markup=False)
    return OK


def _screen() -> Console:
    """The terminal, or what stands in for it, with the library's log on it."""
    from rich.console import Console
    from rich.logging import RichHandler

    screen = Console(stderr=True)
    if screen.is_terminal:
        handler = RichHandler(console=screen, show_path=False, show_time=False)
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    else:  # a file of the output: no line is broken
        logging.basicConfig(level=logging.WARNING, format="%(levelname)-8s %(message)s")
    logging.getLogger("ssl_kd").setLevel(logging.INFO)
    return screen


def _distill(settings: LanguageSettings) -> int:
    from rich.console import Console

    screen = _screen()
    from ssl_kd.language.run import run
    from ssl_kd.report import write_report
    from ssl_kd.report.tables import language_table
    from ssl_kd.training.folder import RunFinished
    from ssl_kd.training.stop import Interrupted

    with Progress(screen) as progress:
        try:
            path = run(settings, progress=progress)
        except RunFinished as ended:  # all but the report, perhaps
            if (ended.path / "report.html").exists():
                raise
            path = ended.path
        try:
            report = write_report(path)
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, path) from None
    out = Console()
    metrics = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
    out.print(language_table(metrics))
    for name, file in {"Student": path / "student", "Report": report}.items():
        out.print(f"{name}: {file}", soft_wrap=True, markup=False)
    return OK


class Progress:
    """Draws the stages of a run: a live bar on a terminal, a line now and then elsewhere.

    Call it with `(stage, done, total, info)`; use it as a context manager around the run.
    """

    quiet_seconds = 10.0  # between two lines where there is no terminal

    def __init__(self, screen: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._screen = screen
        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[info]}", markup=False),
            console=screen,
            disable=not screen.is_terminal,
        )
        self._tasks: dict[str, Any] = {}
        self._spoken: dict[str, float] = {}

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, info: dict[str, Any]) -> None:
        """Show that `done` of `total` units of a stage are done."""
        words = "  ".join(f"{key} {_short(value)}" for key, value in info.items())
        if not self._screen.is_terminal:
            now = time.monotonic()
            last = self._spoken.get(stage, -self.quiet_seconds)
            if done >= total or now - last >= self.quiet_seconds:
                self._spoken[stage] = now
                line = f"{stage:<10} {done}/{total}  {words}".rstrip()
                self._screen.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, info=words)
        self._bars.update(self._tasks[stage], completed=done, total=total, info=words)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _distill_here(argv: Sequence[str]) -> int:
    """Distil a language model; --help lists all settings."""
    return distill(argv, prog="ssl_kd distill")


def _doctor(argv: Sequence[str]) -> int:
    """Check for NaN and infinity; doctor gradients --model M: a language model of yours."""
    return _gradients(argv[1:]) if argv[:1] == ["gradients"] else _check("nan_issues", argv)


def _gradients(argv: Sequence[str]) -> int:
    words = [re.sub("^--model(?==|$)", "--student_model", word) for word in argv]
    verbose = "--verbose" in words

    def work() -> int:
        from ssl_kd.language.settings import PRESETS, LanguageSettings

        settings = read_settings(
            LanguageSettings,
            [word for word in words if word != "--verbose"],
            LANGUAGE_CONFIG,
            prog="ssl_kd doctor gradients --model FOLDER",
            presets=PRESETS,
        )
        _screen()
        from ssl_kd import doctor

        return doctor.language_model(settings, verbose=verbose)

    return guarded(work)


def _verify(argv: Sequence[str]) -> int:
    """Show that live, cached and chunked losses agree on your own models and text."""

    def work() -> int:
        from ssl_kd.language.settings import PRESETS, LanguageSettings

        settings = read_settings(
            LanguageSettings, argv, LANGUAGE_CONFIG, prog="ssl_kd verify", presets=PRESETS
        )

        from rich.console import Console

        screen = _screen()
        from ssl_kd.doctor.verify import agreement_table, verify

        with Progress(screen) as progress:
            found = verify(settings, progress=progress)
        Console().print(agreement_table(found))
        return OK if all(way.agrees for way in found) else FAILED

    return guarded(work)


def _install_check(argv: Sequence[str]) -> int:
    """Check versions, device, precision and folders."""
    return _check("installation", argv)


def _train_here(argv: Sequence[str]) -> int:
    """Run the vision pipeline; --help lists all settings."""
    return train(argv, prog="ssl_kd train")


def _config(argv: Sequence[str]) -> int:
    """Print a settings file, every default under its comment: ssl_kd config train > config.py."""

    def work() -> int:
        from ssl_kd.language.settings import LanguageSettings
        from ssl_kd.vision.settings import VisionSettings

        files = {"train": VisionSettings, "distill": LanguageSettings}
        if len(argv) != 1 or argv[0] not in files:
            raise SettingsError(f"config takes one word, {' or '.join(files)}, not {argv!r}.")
        print(files[argv[0]].file_text(), end="")
        return OK

    return guarded(work)


def _replay(argv: Sequence[str]) -> int:
    """Run the recorded step of a sick head or student again, and name the cause."""
    if argv and argv[0] in ("-h", "--help"):
        print("usage: ssl_kd replay BUNDLE\n\nBUNDLE is a file of a run's folder `faults`.")
        return OK
    if len(argv) != 1:
        _say("replay takes one file, a bundle that a run saved: ssl_kd replay BUNDLE")
        return BAD_SETTING

    def work() -> int:
        from ssl_kd.guard.recorder import load_bundle

        how = load_bundle(argv[0]).settings.get("replay")
        if isinstance(how, dict) and how.get("mode") == "language":
            from ssl_kd.language.replay import replay
        else:
            from ssl_kd.vision.replay import replay

        report = replay(argv[0])
        print(report)
        return OK if report.reproduced else FAILED

    return guarded(work)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train_here,
    "distill": _distill_here,
    "doctor": _doctor,
    "verify": _verify,
    "install-check": _install_check,
    "replay": _replay,
    "config": _config,
}


def _check(name: str, argv: Sequence[str]) -> int:
    unknown = [word for word in argv if word != "--verbose"]
    if unknown:
        _say(f"There is no flag {unknown[0]}; this command takes --verbose only.")
        return BAD_SETTING

    def check() -> int:
        from ssl_kd import doctor

        return getattr(doctor, name)(verbose="--verbose" in argv)

    return guarded(check)


def guarded(work: Callable[[], int], again: str = "") -> int:
    """Do the work; turn every failure that a user can act on into one line and an exit code.

    `again` is the command that started it, which with `--resume` goes on.
    """
    try:
        return work()
    except BaseException as error:
        code, line = _known(error, again)
        if line is None:
            raise
        _say(line)
        return code


def _known(error: Any, again: str) -> tuple[int, str | None]:
    """The exit code and line of a failure that a user can act on; no line for any other."""
    interrupted = getattr(sys.modules.get("ssl_kd.training.stop"), "Interrupted", None)
    if interrupted is not None and isinstance(error, interrupted):
        stop = signal.Signals(error.signal)
        if error.run_dir is None:
            return 128 + stop, f"Stopped by {stop.name} before the training began."
        run_dir = Path(error.run_dir)
        flags = {"--resume": "", "--run_name": f" {shlex.quote(run_dir.name)}"}
        words = again.replace("--run-name", "--run_name")
        more = [name + value for name, value in flags.items() if name not in words]
        way = f"go on with: {' '.join([again, *more])}"
        return 128 + stop, f"Stopped by {stop.name}; a checkpoint is in {run_dir}; {way}"
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "Stopped by SIGINT before the training began."
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("ssl_kd"):
        way = "`make train` sets up everything in .venv; then: .venv/bin/python train.py"
        return FAILED, f"The module {error.name} is not installed for {sys.executable}: {way}"
    if _is_out_of_memory(error):
        way = "lower BATCH_SIZE, N_HEADS or EXTRACT_BATCH_SIZE, or use --device cpu"
        return FAILED, f"Out of memory: {way}. ({str(error).partition('.')[0]})"
    if isinstance(error, OSError):  # no such data, disk full, folder not writable
        return FAILED, str(error)
    kinds = type(error).__mro__
    for kind in kinds:
        if kind.__name__ in _CODES:
            return _CODES[kind.__name__], str(error)
    if any(kind.__module__.startswith("ssl_kd.") for kind in kinds):
        return FAILED, str(error)
    # A ValueError that our own line raised is a considered answer to what was asked for; one from
    # deep inside another library is a fault, and keeps its trace.
    if isinstance(error, ValueError | ImportError) and _raised_in(error).startswith("ssl_kd."):
        return BAD_SETTING, str(error)
    return FAILED, None


def _is_out_of_memory(error: BaseException) -> bool:
    if "torch" not in sys.modules:  # it takes seconds, for what it cannot have raised
        return isinstance(error, MemoryError)
    from ssl_kd.guard.memory import is_out_of_memory

    return is_out_of_memory(error)


def _raised_in(error: BaseException) -> str:
    """The module whose line raised the error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")


def _say(message: object) -> None:
    # One line, whatever the message holds: scripts and eyes both count on it.
    print("ssl_kd: " + " ".join(str(message).split()), file=sys.stderr)
