"""`ssl_kd judge STUDENT`: judge a finished student, print the table and keep it as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.cli.flags import LANGUAGE_CONFIG, flags_after, listed, read_settings
from ssl_kd.errors import OK, InputError
from ssl_kd.settings.early import home_resolved

if TYPE_CHECKING:
    from ssl_kd.language.settings import LanguageSettings

PROG = "ssl_kd judge"
PROMPTS = 32  # that are continued, unless GENERATIONS is given
_HELP = {
    "teacher": "folder or Hub name of the teacher; none: without. Default: the run's, if it is one",
    "out": "file for the results as JSON; default: judged.json in the run's folder, or here",
}
# Of the settings, what evaluation takes; a run's own hold where no flag says otherwise.
_TEXT = {"data_path", "eval_path", "block_size", "packing", "eval_rows"}
_HOW = {"batch_size", "max_new_tokens", "device", "model_dtype", "seed"}


def judge(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    Args:
        argv: The student first, then flags: those of this command, and settings of evaluation.

    Raises:
        SettingsError, InputError: invalid flags, settings or paths.
    """
    if not argv or {"-h", "--help"} & set(argv):
        settings = ", ".join(f"--{name}" for name in sorted(_TEXT | _HOW | {"generations"}))
        print(
            f"usage: {PROG} STUDENT [flags]\n\nSTUDENT is a run's folder (runs/NAME), a saved "
            f"student's (runs/NAME/student) or a name on the Hub.\n\n{listed(_HELP)}\n\n"
            f"and of the settings (ssl_kd distill --help): {settings}"
        )
        return OK
    given, rest = flags_after(argv, PROG, "the student", _HELP)
    rest += [] if given.teacher is None else ["--teacher_model", given.teacher]
    student, run = _student(argv[0])
    out = _out(given.out, run)
    settings = _settings(rest, student, run)
    return _judge(settings, out)


def _judge(settings: LanguageSettings, out: Path) -> int:
    from rich.console import Console

    from ssl_kd.cli.screen import ProgressBars, open_screen

    screen = open_screen()
    from ssl_kd.files import atomic_write_json
    from ssl_kd.language.judge_finished import judge
    from ssl_kd.report.tables import language_table
    from ssl_kd.training.ranks import refuse_ranks

    refuse_ranks()
    with ProgressBars(screen) as progress:
        found = judge(settings, progress=progress)
    atomic_write_json(out, found)
    console = Console()
    # soft_wrap: a path broken over two lines cannot be clicked or copied.
    apart = found["same_tokenizer"] is False
    console.print(language_table({"table": found["table"], "alignment": apart}))
    console.print(f"Results: {out}", soft_wrap=True, markup=False)
    return OK


def _student(word: str) -> tuple[str, Path | None]:
    """Return the student to load, and the run that it comes from, if any."""
    folder = home_resolved(word)
    for run in (folder, folder.parent):
        if _config(run).get("mode") != "language":
            continue
        if not (run / "student").is_dir():
            raise InputError(f"the run {run} has no student yet: expected a finished one")
        return str(run / "student"), run
    if word[0] in "./~" or (folder.parent != Path() and folder.parent.is_dir()):
        if not folder.exists():  # a name on the Hub has no such parent
            raise InputError(f"{folder} is not there: give a run's folder, or a saved student's")
    return word, None


def _config(run: Path) -> dict[str, Any]:
    try:
        found = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no run; what it is instead is found when it is loaded
        return {}
    return found if isinstance(found, dict) else {}


def _out(asked: str | None, run: Path | None) -> Path:
    out = Path(asked) if asked is not None else (run or Path()) / "judged.json"
    if out.is_dir():
        raise InputError(f"--out is {out}, a folder: expected a file")
    if asked is None and out.exists():
        raise InputError(f"{out} exists: name another file, or this one, with --out")
    return out


def _settings(argv: Sequence[str], student: str, run: Path | None) -> LanguageSettings:
    """Return the run's settings of text, teacher and evaluation, changed by the flags."""
    from ssl_kd.language.settings import LanguageSettings
    from ssl_kd.training.folder import check_version

    def derive(settings: LanguageSettings, given: Mapping[str, Any]) -> LanguageSettings:
        own = _TEXT | _HOW
        if other := sorted(given.keys() - own - {"generations", "teacher_model"}):
            raise InputError(
                f"{other[0].upper()} plays no part in judging: leave --{other[0]} out ({PROG} "
                "--help lists what does)"
            )
        teacher = given.get("teacher_model", "none")
        if run is not None:
            config = _config(run)
            check_version(run, config, LanguageSettings)
            settings = LanguageSettings.from_dict(config["settings"])
            teacher = given.get("teacher_model") or (config.get("teacher") or {}).get(
                "name", "none"
            )
        kept = {name: given.get(name, getattr(settings, name)) for name in own}
        prompts = given.get("generations", PROMPTS)
        return LanguageSettings(
            **kept, generations=prompts, student_model=student, teacher_model=teacher
        )

    return read_settings(LanguageSettings, argv, LANGUAGE_CONFIG, prog=PROG, derive=derive)
