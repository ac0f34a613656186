"""The commands `train` (cluster images) and `extract` (only cache their embeddings)."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.cli.failures import guarded
from ssl_kd.cli.flags import FlagParser, integer_from, read_settings, resolve_settings
from ssl_kd.core.errors import OK, InputError
from ssl_kd.core.settings.early import check_dataset, check_run_name, launched_as, run_to_extend

if TYPE_CHECKING:
    from ssl_kd.vision.settings import VisionSettings

# Variables with the rank on this machine: torchrun, Open MPI, MPICH and srun.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def train(argv: Sequence[str], *, config: Path = Path("config.py"), prog: str = "train.py") -> int:
    """Cluster images with the settings in file and flags; return the exit code.

    With `--extend RUN`, add new samples to a finished run instead. With `extract` as the first
    argument, cache the embeddings of all splits and train nothing.

    Args:
        argv: The flags.
        config: The settings file if `--config` is not given; it may be missing.
        prog: The program name that `--help` shows.
    """
    command = shlex.join([*program(prog), *argv])
    if argv[:1] == ["extract"]:
        work = partial(_extract, argv[1:], config, f"{prog} extract")
        return guarded(work, command, kept="complete shards")
    return guarded(lambda: train_and_report(_settings_of_run(argv, config, prog)), command)


def program(prog: str) -> list[str]:
    """Return the command line that starts `prog` again with the same launcher, without flags."""
    if not prog.endswith(".py"):
        return prog.split()
    on_this_machine, in_all = (os.environ.get(f"{name}WORLD_SIZE", "1") for name in ("LOCAL_", ""))
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", on_this_machine]
    several = on_this_machine != "1" and on_this_machine == in_all
    # The same interpreter: another one named python may lack the packages.
    return [sys.orig_argv[0], *(torchrun if several else []), prog]


def _settings_of_run(argv: Sequence[str], config: Path, prog: str) -> VisionSettings:
    """Return the settings; raise for paths that do not exist, before torch is imported."""
    from ssl_kd.vision.settings import VisionSettings

    resolved, flags = resolve_settings(VisionSettings, argv, config, prog=prog)
    resolved.check_recipe("train")
    check_dataset(resolved.dataset)
    check_dataset(resolved.dataset_test)
    if resolved.run_name is not None and "WORLD_SIZE" not in os.environ:
        check_run_name(Path(resolved.runs_dir) / resolved.run_name, resolved.resume)
    if resolved.extend is None:
        return resolved
    run_to_extend(resolved.extend, resolved.runs_dir)
    from ssl_kd.vision.extend import inherited

    return inherited(resolved, flags)


def train_and_report(settings: VisionSettings) -> int:
    """Train with the settings, write the report, and print the results."""
    from ssl_kd.cli.screen import ProgressBars, open_screen, print_result

    screen = open_screen()
    from ssl_kd.core.runs.ranks import follows
    from ssl_kd.vision.assignments import assignments_of
    from ssl_kd.vision.report import reported
    from ssl_kd.vision.report.tables import extension_text, number_text, results_table

    if settings.extend is None:
        from ssl_kd.vision.run import run
    else:
        from ssl_kd.vision.extend import extend as run
    if follows():  # the first process shows and reports
        run(settings)
        return OK

    with ProgressBars(screen) as progress:
        path = reported(partial(run, settings), progress)
    metrics = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
    if any(row.get("acc") is not None for row in metrics["table"]):
        result: Any = results_table(metrics)
    else:
        sizes = metrics["cluster_sizes"]
        about = f"{len(sizes)} clusters of {min(sizes)} to {max(sizes)} samples"
        result = f"{about}. The data has no labels to score them by."
    if summary := extension_text(metrics) if "extended" in metrics else number_text(metrics):
        print(summary + ".")
    files = {"Clusters": assignments_of(path), "Report": path / "report.html"}
    if (path / "faults").exists():
        files["Faults, each explained by ssl_kd replay FILE"] = path / "faults"
    print_result(result, files)
    run_dir = shlex.quote(str(path))
    steps = f"ssl_kd explore {run_dir}; ssl_kd curate {run_dir}; ssl_kd export {run_dir}"
    print(f"Next: {steps} --to parquet")
    return OK


def _extract(argv: Sequence[str], config: Path, prog: str) -> int:
    """Cache the embeddings of all splits, and print the file and a summary of each cache."""
    parser = FlagParser(prog=prog, usage=f"{prog} [flags]", add_help=False)
    add = parser.add_argument
    add("--rank", type=int, help="number of this process in a job array, from 0")
    world = "number of processes; torchrun, mpirun and srun set --rank and --world"
    add("--world", type=int, help=world)
    add("--shard-rows", type=integer_from(1), help="samples per shard; default: about 256 MiB")
    if {"-h", "--help"} & set(argv):
        print(f"Caches the embeddings of all splits, and stops.\n\n{parser.format_help()}")
    flags, rest = parser.parse_known_args(argv)
    share = share_of_process(flags.rank, flags.world)
    from ssl_kd.vision.settings import AUTO, VisionSettings

    resolved = read_settings(VisionSettings, rest, config, prog=prog)
    resolved.check_recipe("train", "evaluate")
    check_dataset(resolved.dataset)
    check_dataset(resolved.dataset_test)
    if resolved.extend is not None:
        raise InputError(
            f"EXTEND is {resolved.extend!r}, but extract only fills caches: leave it out, and run "
            "train.py --extend, which embeds the new data itself"
        )
    from ssl_kd.cli.screen import ProgressBars, open_screen

    with ProgressBars(open_screen()) as progress:
        from ssl_kd.core.precision import Precision
        from ssl_kd.vision.extract import Extraction
        from ssl_kd.vision.patches import PatchExtraction
        from ssl_kd.vision.run import open_extractions

        device = resolved.device if share is None else _device_of_process(resolved.device)
        precision = Precision.for_device(device, resolved.use_fp16)
        kind = PatchExtraction if resolved.token == "patches" else Extraction
        extractions = open_extractions(
            resolved, precision, kind, shard_rows=flags.shard_rows, progress=progress
        )
        rank, world = share or (0, 1)
        if world > 1 and resolved.teacher == AUTO:
            _check_choice(extractions["train"].teacher.setting, world)
        caches = {e.file: e.fill(rank, world) for e in extractions.values()}
    for file, summary in caches.items():
        print(f"{file}: {summary}")
    return OK


def share_of_process(rank: int | None, world: int | None) -> tuple[int, int] | None:
    """Return rank and number of processes from flags or launcher; None if there is only one."""
    if launched := launched_as(os.environ):
        if rank is not None or world is not None:
            raise InputError(
                f"The launcher sets --rank and --world (by {launched[2]}): leave both flags out"
            )
        rank, world, _ = launched
    if rank is None and world is None:
        return None
    if rank is None or world is None or not 0 <= rank < world:
        raise InputError(
            f"--rank is {rank} and --world {world}; expected both, with a rank from 0 to world - 1 "
            "(subtract 1 if your job array counts from 1)"
        )
    return rank, world


def _check_choice(teacher: str, world: int) -> None:
    """Raise InputError if other processes may choose another teacher for TEACHER `auto`.

    Two teachers would fill two caches, and neither would ever be complete.
    """
    from ssl_kd.vision.teachers.choose import OF_PHOTOS

    if teacher in OF_PHOTOS:
        raise InputError(
            "TEACHER is 'auto', which for photographs depends on what a machine has installed and "
            f"can download. This one chose {teacher!r}, another one may not, but all {world} "
            f"processes fill one cache: start each of them with --teacher {teacher}"
        )


def _device_of_process(device: str) -> str:
    """Return the GPU for this process: each process that a launcher started gets another one."""
    local_rank = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "")
    if local_rank.isdecimal() and device in ("auto", "cuda"):
        import torch

        if n_gpus := torch.cuda.device_count():
            return f"cuda:{int(local_rank) % n_gpus}"
    return device
