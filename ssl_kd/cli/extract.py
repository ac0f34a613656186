"""`train.py extract`: fill the caches of all splits and stop, alone, as one of many, or by Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ssl_kd.cli.flags import FlagParser, read_settings
from ssl_kd.errors import OK, InputError
from ssl_kd.settings.early import check_dataset, launched_as

if TYPE_CHECKING:
    from ssl_kd.vision.extract_many import Filled
    from ssl_kd.vision.settings import VisionSettings

_HELP = {
    "engine": "local (this process) | ray (the machines of a Ray cluster: that of RAY_ADDRESS, or"
    " this one alone)",
    "rank": "which of WORLD processes this is, from 0: it embeds shards rank, rank + world, ...",
    "world": "how many processes share the work. A job array gives each its own --rank; torchrun,"
    " mpirun and srun tell both by themselves",
    "shard_rows": "samples per shard; default: about 256 MiB. The first process decides",
}


# Of torchrun, Open MPI, MPICH and srun.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclass(frozen=True)
class Ways:
    """How the work is shared.

    Attributes:
        engine: `local` or `ray`.
        rank: which process this is; None: the only one.
        world: how many there are.
        shard_rows: samples per shard; None: about 256 MiB.
    """

    engine: str
    rank: int | None
    world: int
    shard_rows: int | None


def extract(argv: Sequence[str], config: Path, prog: str) -> int:
    """Do it, and print where each cache is and what it holds; return the exit code.

    Args:
        argv: The flags: those of the settings, and of this command.
        config: The settings file where no `--config` is given.
        prog: What `--help` calls the program.

    Raises:
        SettingsError, InputError: invalid flags, settings or paths.
    """
    if {"-h", "--help"} & set(argv):
        flags = "\n".join(f"  --{name} {name.upper()}\n      {of}" for name, of in _HELP.items())
        print(f"Fills the caches of all splits, and stops. Flags of this command:\n\n{flags}\n")
    ways, rest = _ways(argv, os.environ)
    from ssl_kd.vision.settings import VisionSettings

    settings = read_settings(VisionSettings, rest, config, prog=prog)
    for source in (settings.dataset, settings.dataset_test):
        check_dataset(source)
    if settings.extend is not None:
        raise InputError(
            f"EXTEND is {settings.extend!r}: an extension embeds its data itself; leave it out here"
        )
    from ssl_kd.cli.screen import ProgressBars, open_screen

    with ProgressBars(open_screen()) as progress:
        found = _work(settings, ways)(shard_rows=ways.shard_rows, progress=progress)
    for cache in found:
        print(f"{cache.manifest}: {cache.told}")
    return OK


def _ways(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[Ways, list[str]]:
    """How the work is shared, and the other flags."""
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--engine", default="local", choices=("local", "ray"))
    for name in ("rank", "world", "shard-rows"):
        parser.add_argument(f"--{name}", type=int)
    given, rest = parser.parse_known_args(argv)
    rank, world, source = given.rank, given.world, "--rank and --world"
    if (rank is None) != (world is None):
        alone, other = ("--rank", "--world") if world is None else ("--world", "--rank")
        raise InputError(f"{alone} came without {other}: give both, --rank 0 --world 4")
    if (found := launched_as(environment)) is not None:
        if world is not None and (rank, world) != found[:2]:
            raise InputError(
                f"--rank is {rank} and --world {world}, but a launcher made this process rank "
                f"{found[0]} of {found[1]} ({found[2]}), and all it started would do the same "
                "shards: leave out --rank and --world"
            )
        rank, world, source = found
    if given.engine == "ray" and world is not None:
        raise InputError(
            f"--engine ray shares the work itself, but {source} make this process one of {world}: "
            "start it once, with python alone"
        )
    if world is not None and not 0 <= rank < world:
        raise InputError(
            f"--rank is {rank} and --world {world}; expected a rank from 0 to world - 1 (a job "
            "array that counts from 1 subtracts it)"
        )
    if given.shard_rows is not None and given.shard_rows < 1:
        raise InputError(f"--shard_rows is {given.shard_rows}; expected at least 1")
    return Ways(given.engine, rank, world or 1, given.shard_rows), rest


def _work(settings: VisionSettings, ways: Ways) -> Callable[..., list[Filled]]:
    if ways.engine == "ray":
        from ssl_kd.vision.extract_ray import fill_by_ray

        return partial(fill_by_ray, settings)
    from ssl_kd.vision.extract_many import fill, fill_share

    if ways.rank is None:
        return partial(fill, settings)
    return partial(fill_share, _on_own_gpu(settings), ways.rank, ways.world)


def _on_own_gpu(settings: VisionSettings) -> VisionSettings:
    """One GPU for each process that a launcher started on this machine."""
    local = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "")
    if local.isdecimal() and settings.device in ("auto", "cuda"):
        import torch

        if gpus := torch.cuda.device_count():
            return settings.replace(device=f"cuda:{int(local) % gpus}")
    return settings
