"""The command line: settings in, a run folder and a screenful out, one line per known failure."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd import __version__
from ssl_kd.cli.failures import LANGUAGE_MEMORY, VISION_MEMORY, guarded, keep_writing, say
from ssl_kd.cli.flags import LANGUAGE_CONFIG, FlagParser, read_settings
from ssl_kd.errors import BAD_INPUT, FAILED, OK, InputError
from ssl_kd.settings import nearest
from ssl_kd.settings.early import check_dataset, check_run_name, run_to_extend

if TYPE_CHECKING:
    from ssl_kd.language.settings import LanguageSettings
    from ssl_kd.report.gallery import Images
    from ssl_kd.training.clock import Progress
    from ssl_kd.vision.settings import VisionSettings


def main(argv: Sequence[str] | None = None) -> int:
    """`ssl_kd train | distill | doctor ...`: run one command and return its exit code.

    Args:
        argv: The words after the program's name; None: this process's own.
    """
    keep_writing()
    if argv is None:
        sys.path.append("")  # where one stands, as `python train.py` has it: heads/ is there
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else "--help"
    if command in ("-h", "--help"):
        lines = [f"  ssl_kd {name:<14} {about}" for name, (_, about) in _COMMANDS.items()]
        print("usage: ssl_kd COMMAND [flags]\n\n" + "\n".join(lines))
        return OK
    if command == "--version":
        print(__version__)
        return OK
    if command not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        say(f"There is no command {command!r}, only {known}.{nearest(command, _COMMANDS)}")
        return BAD_INPUT
    return _COMMANDS[command][0](words)


# --- What the scripts call ------------------------------------------------------------------------


def train(argv: Sequence[str], *, config: Path = Path("config.py"), prog: str = "train.py") -> int:
    """Embed, train, judge and report, as `config.py` and the flags say; return the exit code.

    With `--extend RUN` add new samples to a finished run instead; with `extract` as the first word
    embed all splits, and stop.

    Args:
        argv: The flags.
        config: The settings file where no `--config` is given; it may be missing.
        prog: What `--help` calls the program.
    """

    def work() -> int:
        if argv[:1] == ["extract"]:
            from ssl_kd.cli.extract import extract

            return extract(argv[1:], config, f"{prog} extract")

        from ssl_kd.vision.settings import VisionSettings

        def derive(settings: VisionSettings, given: Mapping[str, Any]) -> VisionSettings:
            for source in (settings.dataset, settings.dataset_test):
                check_dataset(source)
            if settings.run_name is not None and "WORLD_SIZE" not in os.environ:
                check_run_name(Path(settings.runs_dir) / settings.run_name, settings.resume)
            if settings.extend is None:
                return settings
            run_to_extend(settings.extend, settings.runs_dir)
            from ssl_kd.vision.extend import inherited

            return inherited(settings, given)

        return _train(read_settings(VisionSettings, argv, config, prog=prog, derive=derive))

    kept = "complete shards" if argv[:1] == ["extract"] else ""
    return guarded(work, shlex.join([*program(prog), *argv]), kept=kept)


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
    words = [*program(prog), *argv]
    return distill_as(lambda: _language_settings(argv, prog, config, preset), words)


def cache_teacher(
    argv: Sequence[str], *, config: Path = LANGUAGE_CONFIG, prog: str = "cache_teacher.py"
) -> int:
    """Keep a teacher's distributions over a text, for runs without it; return the exit code.

    Args:
        argv: The flags, those of `distill`.
        config: The settings file where no `--config` is given; it may be missing.
        prog: What `--help` calls the program.
    """

    def work() -> int:
        settings = _language_settings(argv, prog, config)
        from ssl_kd.cli.screen import ProgressBars, open_screen, short

        screen = open_screen()
        from ssl_kd.language.caching import cache_teacher
        from ssl_kd.training.ranks import following, follows

        if follows():
            with following():
                cache_teacher(settings)
            return OK
        with ProgressBars(screen) as progress:
            caches = cache_teacher(settings, progress=progress)
        for cache in caches:
            facts = ", ".join(f"{name} {short(value)}" for name, value in cache.facts().items())
            print(f"{cache.folder}: {facts}")
        return OK

    again = shlex.join([*program(prog), *argv])
    return guarded(work, again, LANGUAGE_MEMORY, kept="complete shards")


def distill_as(read: Callable[[], LanguageSettings], words: Sequence[str]) -> int:
    """Distil a language model and show the result; return the exit code.

    Args:
        read: Resolves the settings; what it raises becomes one line.
        words: The command that started it, which with `--resume` goes on.
    """
    return guarded(lambda: _distill(read()), shlex.join(words), LANGUAGE_MEMORY)


# --- The commands ---------------------------------------------------------------------------------


def _doctor(argv: Sequence[str]) -> int:
    return _gradients(argv[1:]) if argv[:1] == ["gradients"] else _check("nan_issues", argv)


def _gradients(argv: Sequence[str]) -> int:
    words = [re.sub("^--model(?==|$)", "--student_model", word) for word in argv]
    flags = [word for word in words if word != "--verbose"]

    def work() -> int:
        if re.search(r"(^| )--model( --|$)", " ".join(argv)):
            raise InputError("--model takes one value, a folder or a name on the Hub; none came.")
        settings = _language_settings(flags, "ssl_kd doctor gradients --model FOLDER")
        from ssl_kd.cli.screen import open_screen

        open_screen()
        from ssl_kd import doctor

        return doctor.language_model(settings, verbose="--verbose" in words)

    return guarded(work, memory=LANGUAGE_MEMORY)


def _verify(argv: Sequence[str]) -> int:
    def work() -> int:
        settings = _language_settings(argv, "ssl_kd verify")

        from rich.console import Console

        from ssl_kd.cli.screen import ProgressBars, open_screen

        screen = open_screen()
        from ssl_kd.doctor.finding import table
        from ssl_kd.doctor.verify import agreement_table, verify
        from ssl_kd.doctor.verify_served import compare_served
        from ssl_kd.training.ranks import refuse_ranks

        refuse_ranks()

        with ProgressBars(screen) as progress:
            found = verify(settings, progress=progress)
        Console().print(agreement_table(found))
        agree = all(way.agrees for way in found)
        if settings.teacher_url is not None:
            served = compare_served(settings)
            Console().print(table(served))
            agree &= not any(finding.change for finding in served)
        return OK if agree else FAILED

    return guarded(work, memory=LANGUAGE_MEMORY)


def _check(name: str, argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print("The only flag is --verbose: list each distinct warning with its count.")
        return OK

    def work() -> int:
        if unknown := [word for word in argv if word != "--verbose"]:
            raise InputError(f"There is no flag {unknown[0]}; this command takes --verbose only.")
        from ssl_kd import doctor

        return getattr(doctor, name)(verbose="--verbose" in argv)

    return guarded(work)


def _config(argv: Sequence[str]) -> int:
    """Print a settings file, every default under its comment: ssl_kd config train > config.py."""
    if argv and argv[0] in ("-h", "--help"):
        print("usage: ssl_kd config train > config.py, or distill > scripts/config.py")
        return OK

    def work() -> int:
        from ssl_kd.language.settings import LanguageSettings
        from ssl_kd.vision.settings import VisionSettings

        files = {"train": VisionSettings, "distill": LanguageSettings}
        if len(argv) != 1 or argv[0] not in files:
            came = " ".join(argv) or "nothing"
            raise InputError(f"config takes one argument, {' or '.join(files)}; got {came}.")
        print(files[argv[0]].file_text(), end="")
        return OK

    return guarded(work)


def _replay(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print(
            "usage: ssl_kd replay BUNDLE [--head CLASS] [--loss CLASS]\n\n"
            "BUNDLE is a file of a run's folder `faults`. CLASS is the import path of a head or "
            "loss of your own:\nonly what you name here is imported, whatever the bundle names."
        )
        return OK

    def work() -> int:
        parser = FlagParser(prog="ssl_kd replay", allow_abbrev=False)
        parser.add_argument("bundle", nargs="?")
        parser.add_argument("--head")
        parser.add_argument("--loss")
        given, more = parser.parse_known_args(argv)
        if not given.bundle or more:
            raise InputError(
                "replay takes one file, a bundle that a run saved: ssl_kd replay BUNDLE"
            )
        from ssl_kd.cli.screen import open_screen

        open_screen()
        from ssl_kd.guard.recorder import load_bundle

        how = load_bundle(given.bundle).settings.get("replay")
        if isinstance(how, dict) and how.get("mode") == "language":
            from ssl_kd.language import replay as language

            report = language.replay(given.bundle)
        else:
            from ssl_kd.vision import replay as vision

            report = vision.replay(given.bundle, head=given.head, loss=given.loss)
        print(report)
        return OK if report.reproduced else FAILED

    return guarded(work)


def _in_module(name: str, argv: Sequence[str], memory: str = VISION_MEMORY) -> int:
    """Run the command of the module `ssl_kd.cli.NAME`, which is imported only then."""

    def work() -> int:
        return getattr(importlib.import_module(f"ssl_kd.cli.{name}"), name)(argv)

    return guarded(work, memory=memory)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (
        partial(train, prog="ssl_kd train"),
        "Run the vision pipeline; --help lists all settings.",
    ),
    "extract": (
        lambda argv: train(["extract", *argv], prog="ssl_kd"),
        "Fill the caches of the teacher's embeddings, on one machine or many, and stop.",
    ),
    "distill": (
        partial(distill, prog="ssl_kd distill"),
        "Distil a language model; --help lists all settings.",
    ),
    "doctor": (
        _doctor,
        "Check for NaN and infinity; doctor gradients --model M: a language model of yours.",
    ),
    "verify": (
        _verify,
        "Show that live, cached, chunked and served teachers agree on your own models and text.",
    ),
    "judge": (
        partial(_in_module, "judge", memory=LANGUAGE_MEMORY),
        "Judge a finished student: perplexity, calibration, repetition: ssl_kd judge RUN.",
    ),
    "curate": (
        partial(_in_module, "curate"),
        "Find copies, outliers, leaks, wrong labels; what to label next: ssl_kd curate RUN.",
    ),
    "explore": (
        partial(_in_module, "explore"),
        "Show a run's samples on a map, and name, merge, split its clusters: ssl_kd explore RUN.",
    ),
    "export": (
        partial(_in_module, "export"),
        "Write a finished run for other programs: ssl_kd export RUN --to parquet, folders ...",
    ),
    "install-check": (
        partial(_check, "installation"),
        "Check packages, device, precision and folders.",
    ),
    "replay": (
        _replay,
        "Run the recorded step of a sick head or student again, and name the cause.",
    ),
    "config": (
        _config,
        "Print a settings file, every default under its comment: ssl_kd config train > config.py",
    ),
}


# --- Runs and their reports -----------------------------------------------------------------------


def _language_settings(
    argv: Sequence[str], prog: str, config: Path = LANGUAGE_CONFIG, preset: str | None = None
) -> LanguageSettings:
    from ssl_kd.language.presets import NOTES, PRESETS
    from ssl_kd.language.settings import LanguageSettings

    known = {"presets": PRESETS, "notes": NOTES}
    settings = read_settings(LanguageSettings, argv, config, prog=prog, preset=preset, **known)
    settings.check_packages()
    return settings


def program(prog: str) -> list[str]:
    """The words that start `prog` once more, as it was started; what follows are its flags."""
    if not prog.endswith(".py"):
        return prog.split()
    here, all_ = (os.environ.get(name, "1") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    ranks = ["-m", "torch.distributed.run", "--nproc_per_node", here] if here != "1" else []
    # This very interpreter: another one named python may lack the packages.
    return [sys.orig_argv[0], *(ranks if here == all_ else []), prog]


def _train(settings: VisionSettings) -> int:
    from ssl_kd.cli.screen import ProgressBars, open_screen

    screen = open_screen()
    from ssl_kd.report import reported, run_images
    from ssl_kd.report.tables import extension_text, next_commands, number_text, results_table
    from ssl_kd.training.ranks import follows
    from ssl_kd.vision.assignments import assignments_of

    if settings.extend is None:
        from ssl_kd.vision.run import run as work
    else:
        from ssl_kd.vision.extend import extend as work
    if follows():  # the first process shows and reports
        work(settings)
        return OK

    def start(tell: Progress) -> tuple[Path, Images | None]:
        done = work(settings, progress=tell)
        return done.path, done.images

    with ProgressBars(screen) as progress:
        path = reported(start, run_images, progress)
    metrics = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
    if any(row.get("acc") is not None for row in metrics["table"]):
        result: Any = results_table(metrics)
    else:
        sizes = metrics["cluster_sizes"]
        found = f"{len(sizes)} clusters of {min(sizes)} to {max(sizes)} samples"
        result = f"{found}; no label is known, so there is nothing to score."
    summary = extension_text(metrics) if "extended" in metrics else number_text(metrics)
    if summary:
        print(summary + ".")
    files = {"Clusters": assignments_of(path), "Report": path / "report.html"}
    if (path / "faults").exists():
        files["Faults, each explained by ssl_kd replay FILE"] = path / "faults"
    code = _show(result, files)
    print(f"Next: {'; '.join(next_commands(path))}")
    return code


def _distill(settings: LanguageSettings) -> int:

    settings.check_packages()
    from ssl_kd.cli.screen import ProgressBars, open_screen

    screen = open_screen()
    from ssl_kd.distillation import Distillation
    from ssl_kd.report.tables import language_table
    from ssl_kd.training.ranks import follows

    with ProgressBars(screen) as progress:
        done = Distillation.of(settings).run(progress=progress)
    if follows():
        return OK
    files = {"Student": done.path / "student", "Report": done.report}
    return _show(language_table(done.metrics), files)


def _show(result: Any, files: dict[str, Path]) -> int:
    """Print what came of a run and where it lies."""
    from rich.console import Console

    out = Console()
    out.print(result)
    # soft_wrap: a path broken over two lines cannot be clicked or copied.
    for name, file in files.items():
        out.print(f"{name}: {file}", soft_wrap=True, markup=False)
    return OK
