"""The commands of the language mode: `distill`, `cache_teacher`, `judge` and `verify`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.cli.failures import LANGUAGE_MEMORY, guarded
from ssl_kd.cli.flags import LANGUAGE_CONFIG, FlagParser, read_settings, resolve_settings
from ssl_kd.cli.vision import program
from ssl_kd.core.errors import FAILED, OK, InputError
from ssl_kd.core.settings.early import home_resolved

if TYPE_CHECKING:
    from ssl_kd.language.settings import LanguageSettings

_JUDGE = "ssl_kd judge"
_JUDGE_PROMPTS = 32  # default of GENERATIONS
# The settings that judging uses; the defaults are those of the run.
_JUDGE_SETTINGS = (
    *("data_path", "eval_path", "text_field", "learn_thoughts", "block_size", "packing"),
    *("chat_template_path", "chat_template_kwargs", "eval_rows", "batch_size", "max_new_tokens"),
    *("rollout_temperature", "device", "model_dtype", "seed", "trust_remote_code"),
)
_JUDGE_TEACHERS = ("teacher_field", "quantization")  # which describe the teachers of the run
_JUDGE_WRITERS = ("on_policy", "teacher_text", "student_text")  # which need a teacher
_JUDGE_FLAGS = {*_JUDGE_SETTINGS, *_JUDGE_TEACHERS, *_JUDGE_WRITERS, "generations"}


def language_settings(
    argv: Sequence[str], prog: str, config: Path = LANGUAGE_CONFIG, preset: str | None = None
) -> LanguageSettings:
    """Read the settings of the language mode; raise if a package that they need is missing."""
    from ssl_kd.language.settings import LanguageSettings
    from ssl_kd.language.settings.presets import NOTES, PRESETS

    known: Any = {"presets": PRESETS, "notes": NOTES}
    resolved = read_settings(LanguageSettings, argv, config, prog=prog, preset=preset, **known)
    resolved.check_recipe("distill")
    resolved.check_packages()
    return resolved


def distill(
    argv: Sequence[str],
    *,
    preset: str | None = None,
    config: Path = LANGUAGE_CONFIG,
    prog: str = "distill.py",
) -> int:
    """Distill a language model with the settings in file and flags; return the exit code.

    Args:
        argv: The flags.
        preset: The preset if `--preset` is not given.
        config: The settings file if `--config` is not given; it may be missing.
        prog: The program name that `--help` shows.
    """
    command = [*program(prog), *argv]
    return distill_as(lambda: language_settings(argv, prog, config, preset), command)


def distill_as(read: Callable[[], LanguageSettings], command: Sequence[str]) -> int:
    """Distill a language model and print its scores; return the exit code.

    Args:
        read: Returns the settings; an error that it raises is printed as one line.
        command: The command line that started the run, for the advice how to continue.
    """

    def work() -> int:
        resolved = read()
        resolved.check_packages()
        from ssl_kd.cli.screen import ProgressBars, open_screen, print_result

        screen = open_screen()
        from ssl_kd.core.runs.ranks import follows
        from ssl_kd.language.distillation import distilled
        from ssl_kd.language.report.tables import continuations, language_table, success_text

        with ProgressBars(screen) as progress:
            finished = distilled(resolved, progress=progress)
        if not follows():
            files = {"Student": finished.path / "student", "Report": finished.report}
            if texts := continuations(finished.metrics):
                print_result(texts, {})
            print_result(language_table(finished.metrics), files)
            print(f"{success_text(finished.metrics)}.")
        return OK

    return guarded(work, shlex.join(command), LANGUAGE_MEMORY)


def cache_teacher(
    argv: Sequence[str], *, config: Path = LANGUAGE_CONFIG, prog: str = "cache_teacher.py"
) -> int:
    """Cache a teacher's token distributions for later runs; return the exit code.

    The flags are those of `distill`.
    """

    def work() -> int:
        resolved = language_settings(argv, prog, config)
        from ssl_kd.cli.screen import ProgressBars, open_screen, short

        screen = open_screen()
        from ssl_kd.core.runs.ranks import following, follows
        from ssl_kd.language.teachers.caching import cache_teacher

        if follows():
            with following():
                cache_teacher(resolved)
            return OK
        with ProgressBars(screen) as progress:
            cache = cache_teacher(resolved, progress=progress)
        facts = ", ".join(f"{name} {short(value)}" for name, value in cache.facts().items())
        print(f"{cache.folder}: {facts}")
        return OK

    command = shlex.join([*program(prog), *argv])
    return guarded(work, command, LANGUAGE_MEMORY, kept="complete shards")


def verify(argv: Sequence[str]) -> int:
    """Compare plain, live and cached losses; return 1 if they do not agree."""
    resolved = language_settings(argv, "ssl_kd verify")
    from rich.console import Console

    from ssl_kd.cli.screen import ProgressBars, open_screen

    screen = open_screen()
    from ssl_kd.core.runs.ranks import refuse_ranks
    from ssl_kd.doctor.verify import agreement_table, verify

    refuse_ranks()
    with ProgressBars(screen) as progress:
        ways = verify(resolved, progress=progress)
    Console().print(agreement_table(ways))
    return OK if all(way.agrees for way in ways) else FAILED


def judge(argv: Sequence[str]) -> int:
    """Score a finished student, print the scores and write them as JSON."""
    names = ", ".join(f"--{name}" for name in sorted(_JUDGE_FLAGS))
    epilog = f"Settings of ssl_kd distill that are flags here, too: {names}"
    parser = FlagParser(prog=_JUDGE, epilog=epilog)
    add = parser.add_argument
    add("student", metavar="STUDENT", help="runs/NAME, a saved student's folder, or a Hub name")
    teacher = "folders or Hub names, as TEACHER_MODEL; none: no teacher; default: those of the run"
    add("--teacher", "--teacher-model", help=teacher)
    results = "JSON file for the results; default: judged.json in the run folder"
    add("--out", type=Path, help=results)
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
        raise InputError(
            f"The student comes first, before {argv[0]}: {_JUDGE} runs/latest {argv[0]} ..."
        )
    flags, rest = parser.parse_known_args(argv)
    student, run = _student(flags.student)
    out: Path = flags.out or (run or Path()) / "judged.json"
    if out.is_dir():
        raise InputError(f"--out is {out}, a folder; expected a file")
    if flags.out is None and out.exists():
        raise InputError(f"{out} exists: give another file with --out, or this one to replace it")
    resolved = _judged_settings(rest, student, run, flags.teacher)

    from ssl_kd.cli.screen import ProgressBars, open_screen, print_result

    screen = open_screen()
    from ssl_kd.core.files import atomic_write_json
    from ssl_kd.core.runs.folder import check_writable
    from ssl_kd.core.runs.ranks import refuse_ranks
    from ssl_kd.language.evaluate.judge_finished import judge
    from ssl_kd.language.report.tables import language_table

    refuse_ranks()
    check_writable("OUT", out, is_file=True)
    with ProgressBars(screen) as progress:
        results = judge(resolved, progress=progress)
    atomic_write_json(out, results)
    two_tokenizers = results["same_tokenizer"] is False
    table = language_table({"table": results["table"], "alignment": two_tokenizers})
    print_result(table, {"Results": out})
    return OK


def _student(name: str) -> tuple[str, Path | None]:
    """Return the student to load, and the run folder that contains it, if any."""
    folder = home_resolved(name)
    for run in (folder, folder.parent):
        if _config_of(run).get("mode") != "language":
            continue
        if not (run / "student").is_dir():
            raise InputError(f"The run {run} has no student yet: give a finished run")
        return str(run / "student"), run
    # A name on the Hub has no parent folder here.
    is_path = name[:1] in "./~" or (folder.parent != Path() and folder.parent.is_dir())
    if is_path and not folder.exists():
        raise InputError(f"{folder} does not exist: give a run folder or a saved student")
    return name, None


def _config_of(run: Path) -> dict[str, Any]:
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not a run; loading the student raises a clear error
        return {}
    return config if isinstance(config, dict) else {}


def _judged_settings(
    argv: Sequence[str], student: str, run: Path | None, teacher: str | None
) -> LanguageSettings:
    """Return the run's settings that judging uses, changed by the flags."""
    from ssl_kd.core.runs.folder import check_version
    from ssl_kd.language.settings import LanguageSettings

    resolved, flags = resolve_settings(LanguageSettings, argv, LANGUAGE_CONFIG, prog=_JUDGE)
    unused = flags.keys() - _JUDGE_FLAGS
    if unused := ["recipe"] if "recipe" in unused else sorted(unused):
        raise InputError(
            f"--{unused[0]} has no effect on judging: leave it out ({_JUDGE} --help lists the "
            "settings that have)"
        )
    kept = list(_JUDGE_SETTINGS)
    if run is not None:
        config = _config_of(run)
        check_version(run, config, LanguageSettings)
        resolved = LanguageSettings.from_dict(config["settings"])
        if teacher is None:
            several, first = len(resolved.teacher_names) > 1, config.get("teacher") or {}
            teacher = resolved.teacher_model if several else first.get("name")
            kept += _JUDGE_TEACHERS if teacher else ()
        kept += _JUDGE_WRITERS if (teacher or "none") != "none" else ()
    values = {name: getattr(resolved, name) for name in kept}
    values |= {name: flags[name] for name in flags.keys() & _JUDGE_FLAGS}
    return LanguageSettings(
        **{"generations": _JUDGE_PROMPTS, **values},
        student_model=student,
        teacher_model=teacher or "none",
    )
