"""Keep what a sweep is to train in its folder, so that it continues after an interruption."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_kd.core.errors import InputError, RunFolderError
from ssl_kd.core.files import CorruptFileError, atomic_write_json, atomic_write_text
from ssl_kd.core.runs.writer import read_json
from ssl_kd.core.settings import Settings
from ssl_kd.sweep.grid import Combination

PLAN = "sweep.json"
_VERSION = 1


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep: a folder for each in `folder`, and the settings that they share.

    Attributes:
        mode: the command that trains a run, `train` or `distill`.
        shared: settings that are not the defaults, by UPPER_CASE names.
        runs: name of a run's folder -> the settings that are its own.
        groups: name of a run's folder -> a text; runs with the same text share their caches.
        threads: of each run. Results on a CPU depend on it in their last bits.
    """

    folder: Path
    mode: str
    shared: Mapping[str, Any]
    runs: Mapping[str, Combination]
    groups: Mapping[str, str]
    threads: int

    def save(self) -> Sweep:
        """Write the plan, or continue that of the folder; return what is to be trained.

        A plan that is there may be extended by more values of the same settings. Its number of
        threads is kept.

        Raises:
            RunFolderError: the folder holds another sweep, or something else.
        """
        file = self.folder / PLAN
        threads, before = self.threads, dict[str, Any]()
        if file.exists():
            plan = read_object(file)
            threads, before = plan["threads"], plan["runs"]
            same = {"mode": self.mode, "shared": dict(self.shared), "version": _VERSION}
            for name, value in same.items():
                if plan[name] != value:
                    raise RunFolderError(
                        f"{self.folder} holds another sweep ({_difference(plan[name], value)}): "
                        "choose another --name"
                    )
            if self._axes() != {name for own in before.values() for name in own}:
                raise RunFolderError(
                    f"{self.folder} holds a sweep of other settings: choose another --name"
                )
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise RunFolderError(
                f"{self.folder} holds something else than a sweep: choose another --name"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        runs = {**before, **{name: dict(own) for name, own in self.runs.items()}}
        about = {"version": _VERSION, "mode": self.mode, "threads": threads}
        lines = [f"{name} = {value!r}\n" for name, value in self.shared.items()]
        atomic_write_text(self.config, "".join(lines))
        atomic_write_json(file, {**about, "shared": dict(self.shared), "runs": runs})
        return Sweep(self.folder, self.mode, self.shared, self.runs, self.groups, threads)

    @property
    def config(self) -> Path:
        """The settings file that all runs read."""
        return self.folder / "config.py"

    def arguments(self, name: str) -> list[str]:
        """Return the arguments of `ssl_kd` that train a run, or continue it."""
        own = [word for field, text in self.runs[name].items() for word in (f"--{field}", text)]
        place = ["--runs_dir", str(self.folder), "--run_name", name]
        begun = (self.folder / name / "config.json").exists()
        return [
            *(self.mode, "--config", str(self.config), *own, *place),
            *(["--resume"] if begun else []),
        ]

    def command(self, name: str) -> str:
        """Return the command that trains a run, for a person to type."""
        return shlex.join(["ssl_kd", *self.arguments(name)])

    def _axes(self) -> set[str]:
        return {field for own in self.runs.values() for field in own}


def shared_settings(resolved: Settings, swept: set[str]) -> dict[str, Any]:
    """Return the settings that are not at their defaults, without those that are swept."""
    left_out = {"RUNS_DIR", "RUN_NAME", "RESUME", *(name.upper() for name in swept)}
    defaults = {name.upper(): getattr(type(resolved), name) for name in resolved.rules()}
    values = resolved.to_dict()
    return {n: v for n, v in values.items() if n not in left_out and v != defaults[n]}


def check_name(name: str) -> str:
    """Return the name of a sweep; raise InputError if it cannot name a folder."""
    if name in ("", ".", "..", "latest") or "/" in name or "\\" in name:
        raise InputError(f"--name is {name!r}; expected a name without slashes, such as betas")
    return name


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise CorruptFileError if there is something else in it."""
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise CorruptFileError(
            f"{file} cannot be read ({error}): restore it, or remove it"
        ) from error
    if not isinstance(content, dict):
        raise CorruptFileError(
            f"{file} holds a {type(content).__name__}; expected an object in JSON: restore it, or "
            "remove it"
        )
    return content


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                was, new = (values.get(name, "its default") for values in (before, now))
                return f"{name} was {was!r}, and is {new!r}"
    return f"it was {before!r}, and is {now!r}"
