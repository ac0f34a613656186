"""The commands `sweep` (train a grid of runs) and `table` (put runs in a table)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.cli.failures import guarded
from ssl_kd.cli.flags import LANGUAGE_CONFIG, FlagParser, integer_from, resolve_settings
from ssl_kd.cli.vision import share_of_process
from ssl_kd.core.errors import FAILED, OK, InputError
from ssl_kd.core.settings import RunSettings, SettingsError
from ssl_kd.core.settings.early import check_dataset

if TYPE_CHECKING:
    from ssl_kd.sweep.grid import Combination, Grid
    from ssl_kd.sweep.plan import Sweep
    from ssl_kd.sweep.table import RunTable

# Sections of the settings that decide on caches, by mode.
_CACHES = {"train": ("Data", "Teacher and embeddings"), "distill": ("Teacher", "Text")}
_DESCRIPTION = """Trains a run for each combination of settings with several values, such as
--beta 0.5,0.6 --seed 0..4. All other flags are those of ssl_kd train; after the word distill, those
of ssl_kd distill. The same command continues an interrupted sweep, and tries failed runs again."""


def sweep(argv: Sequence[str]) -> int:
    """Train a grid of runs, and print their table; return 1 if a run failed."""
    command = shlex.join(["ssl_kd", "sweep", *argv])
    return guarded(partial(_sweep, list(argv)), command, kept="finished runs and checkpoints")


def _sweep(argv: list[str]) -> int:
    mode = "distill" if argv[:1] == ["distill"] else "train"
    parser = FlagParser(prog="ssl_kd sweep", description=_DESCRIPTION)
    add = parser.add_argument
    add("--name", required=True, help="name of the folder in RUNS_DIR that gets the runs")
    add("--jobs", type=integer_from(1), help="runs at once; default: 1, or one per GPU")
    add("--list", type=Path, help="CSV file of settings: a column for each, a row for each run")
    add("--rank", type=int, help="number of this process in a job array, from 0")
    add("--world", type=int, help="number of processes; srun and mpirun set --rank and --world")
    add("--dry-run", action="store_true", help="print the commands of the runs, and stop")
    words = argv[1:] if mode == "distill" else argv
    flags, rest = parser.parse_known_args(words)
    rank, world = share_of_process(flags.rank, flags.world) or (0, 1)

    from ssl_kd.sweep.grid import Grid, read_list
    from ssl_kd.sweep.plan import check_name

    settings = _settings_class(mode)
    grid = Grid.read(settings, rest)
    listed = read_list(flags.list, settings) if flags.list else []
    combinations = grid.combinations(listed)
    plan = _plan(mode, check_name(flags.name), grid, combinations)
    if flags.dry_run:
        plan = plan.continued()
        print("\n".join(plan.command(name) for name in plan.runs))
        return OK
    gpus = _gpus(plan)
    jobs = flags.jobs or max(1, len(gpus))
    plan = plan.save(_threads(jobs))
    return _train(plan, list(plan.runs)[rank::world], jobs, gpus)


def _settings_class(mode: str) -> type[RunSettings]:
    if mode == "train":
        from ssl_kd.vision.settings import VisionSettings

        return VisionSettings
    from ssl_kd.language.settings import LanguageSettings

    return LanguageSettings


def _plan(mode: str, name: str, grid: Grid, combinations: Mapping[str, Combination]) -> Sweep:
    """Return the plan of a sweep.

    Raises:
        SettingsError: the settings of a run are invalid.
        InputError: two runs have the same settings.
    """
    from ssl_kd.language.settings.presets import PRESETS
    from ssl_kd.sweep.grid import flags_of
    from ssl_kd.sweep.plan import Sweep, shared_settings

    settings = _settings_class(mode)
    config = Path("config.py") if mode == "train" else LANGUAGE_CONFIG
    options: dict[str, Any] = {"presets": PRESETS} if mode == "distill" else {}
    resolved: dict[str, RunSettings] = {}
    same: dict[str, str] = {}  # settings -> the run that has them
    for run, own in combinations.items():
        flags = [*grid.flags, *flags_of(own)]
        try:
            resolved[run], _ = resolve_settings(
                settings, flags, config, prog="ssl_kd sweep", **options
            )
            resolved[run].check_recipe(mode)
        except SettingsError as error:
            raise SettingsError(f"{error}{_way_out(grid, run, own)}") from error
        values = resolved[run].to_dict()
        if mode == "train":
            check_dataset(values["DATASET"])
            check_dataset(values["DATASET_TEST"])
        if (other := same.setdefault(repr(values), run)) != run:
            raise InputError(
                f"The runs {other} and {run} have the same settings: give each value once"
            )
    first = next(iter(resolved.values()))
    swept = {field for own in combinations.values() for field in own}
    deciding = _deciding_on_caches(settings, mode) & swept
    groups = {
        run: shlex.join(text for field, text in own.items() if field in deciding)
        for run, own in combinations.items()
    }
    folder = Path(first.runs_dir) / name
    shared = shared_settings(first, swept)
    return Sweep(folder, mode, shared, combinations, groups, settings.free_on_resume)


def _way_out(grid: Grid, run: str, own: Combination) -> str:
    """Return what to do about settings of a run that do not fit together; empty without axes."""
    if not grid.axes:
        return ""
    names = " and ".join(name.upper() for name in grid.axes)
    text = f". This is the run {run} of the grid of {names}"
    if len(own) > 1:
        text += ": if not all combinations fit, give those that do in a CSV file, with --list FILE"
    return f"{text}. A comma that belongs to a value is written \\,"


def _threads(jobs: int) -> int:
    """Return the number of threads of each run: OMP_NUM_THREADS, or its share of the cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        return int(threads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // jobs)


def _gpus(plan: Sweep) -> list[str]:
    """Return the values of CUDA_VISIBLE_DEVICES that divide several GPUs between the runs.

    The list is empty with one GPU at most, and where DEVICE names the device.
    """
    is_swept = any("device" in own for own in plan.runs.values())
    if is_swept or plan.shared.get("DEVICE", "auto") not in ("auto", "cuda"):
        return []
    import torch

    n = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else [f"{i}" for i in range(n)]
    return names[:n] if n > 1 else []


def _deciding_on_caches(settings: type[RunSettings], mode: str) -> set[str]:
    """Return the settings in the sections that decide on caches."""
    found: set[str] = set()
    section = ""
    for name, (_, _, rule) in settings.rules().items():
        section = rule.section or section
        if section in _CACHES[mode]:
            found.add(name)
    return found


def _train(plan: Sweep, names: Sequence[str], jobs: int, gpus: Sequence[str]) -> int:
    """Train runs, and print the table of the whole sweep."""
    from ssl_kd.cli.screen import open_screen

    screen = open_screen()
    from ssl_kd.core.pages.sweep_curves import update_reports
    from ssl_kd.core.runs.sweeps import is_finished
    from ssl_kd.sweep.launch import Outcome, run_sweep
    from ssl_kd.sweep.records import read_runs
    from ssl_kd.sweep.table import RunTable

    done = sum(is_finished(plan.folder / name) for name in names)
    what = f"{plan.folder}: {len(names)} runs, {done} of them finished; {plan.threads} threads each"
    screen.print(what, markup=False, highlight=False, soft_wrap=True)

    def said(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        how = f"failed: {outcome.reason}" if outcome.code else "finished"
        text = f"{done}/{len(names)} {outcome.name}: {how} ({outcome.seconds:.0f} s)"
        screen.print(text, markup=False, highlight=False, soft_wrap=True)

    outcomes = run_sweep(plan, names, jobs=jobs, gpus=gpus, on_end=said)
    if outcomes:
        update_reports(plan.folder)
    records, unfinished = read_runs([plan.folder])
    if not records:
        return FAILED
    _print_table(RunTable.of(records, unfinished))
    print(f"Again, or in another form: ssl_kd table {shlex.quote(str(plan.folder))}")
    return FAILED if any(outcome.code for outcome in outcomes) else OK


def table(argv: Sequence[str]) -> int:
    """Print a table of runs, or write it to a file."""
    from ssl_kd.sweep.table import FORMATS, SUFFIXES

    about = (
        "Prints mean and 95 % interval of the scores over seeds for each group of runs that differ "
        "in other settings, the best of each column in bold, and differences from the first group, "
        "paired by seed."
    )
    parser = FlagParser(prog="ssl_kd table", description=about)
    add = parser.add_argument
    what = "run folder, folder of runs such as that of a sweep, or a pattern"
    add("runs", metavar="RUN", nargs="+", help=what)
    add("--scores", help="scores to show, such as acc,nmi,seconds; default: the usual ones")
    add("--against", help="group that others are compared with, such as beta=0.6")
    add("--format", choices=FORMATS, help="default: by the suffix of --out, or terminal")
    add("--out", type=Path, help=f"file to write ({', '.join(SUFFIXES)})")
    add("--commands", action="store_true", help="list commit, folder and command of every run")
    flags = parser.parse_args(argv)
    form = flags.format or (SUFFIXES.get(flags.out.suffix) if flags.out else "terminal")
    if form is None or (flags.out and form == "terminal"):
        raise InputError(
            f"--out is {flags.out}; expected a file that ends with {', '.join(SUFFIXES)}, or "
            "--format csv, markdown or latex"
        )

    from ssl_kd.core.files import atomic_write_text
    from ssl_kd.sweep import table as forms
    from ssl_kd.sweep.records import read_runs

    scores = [score.strip() for score in flags.scores.split(",")] if flags.scores else []
    runs = forms.RunTable.of(*read_runs(flags.runs), scores=scores, against=flags.against)
    if form == "terminal":
        _print_table(runs, commands=flags.commands)
        return OK
    writers = {
        "csv": forms.comma_separated,
        "markdown": forms.markdown,
        "latex": forms.latex,
    }
    text = writers[form](runs)
    if flags.out is None:
        print(text, end="")
    else:
        atomic_write_text(flags.out, text)
        print(f"Table: {flags.out}")
    return OK


def _print_table(runs: RunTable, *, commands: bool = False) -> None:
    from ssl_kd.cli.screen import result_console
    from ssl_kd.sweep.table import provenance, terminal_tables

    console = result_console()
    for heading, drawn in terminal_tables(runs):
        if heading:
            console.print(f"\n{heading}", markup=False, highlight=False)
        console.print(drawn)
    for line in [*runs.notes, *(provenance(runs) if commands else [])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
