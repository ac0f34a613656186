"""Keep what a sweep is to train in its folder, so that it continues after an interruption."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssl_kd.core.errors import InputError, RunFolderError
from ssl_kd.core.files import atomic_write_json, atomic_write_text
from ssl_kd.core.files.lock import Lock
from ssl_kd.core.runs.sweeps import PLAN, read_object
from ssl_kd.core.settings import Settings
from ssl_kd.sweep.grid import Combination, flags_of, named

_LOCK = "sweep.lock"
_WAIT = 60.0  # seconds for another process that writes the plan
_VERSION = 1


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep: a folder for each in `folder`, and the settings that they share.

    Attributes:
        mode: the command that trains a run, `train` or `distill`.
        shared: settings that are not the defaults, by UPPER_CASE names.
        runs: name of a run's folder -> the settings that are its own.
        groups: name of a run's folder -> a text; runs with the same text share their caches.
        free: shared settings that may change when the sweep continues, by lower-case names.
        threads: of each run, known when the plan is saved. Results on a CPU depend on it in their
            last bits.
    """

    folder: Path
    mode: str
    shared: Mapping[str, Any]
    runs: Mapping[str, Combination]
    groups: Mapping[str, str]
    free: Collection[str] = ()
    threads: int = 1

    def save(self, threads: int) -> Sweep:
        """Write the plan, or continue that of the folder; return what is to be trained.

        Args:
            threads: of each run; a plan that is there keeps its number.

        Raises:
            RunFolderError: the folder holds another sweep, or something else.
        """
        try:
            self._read()
        except RunFolderError:
            if not (self.folder / _LOCK).exists():  # else another process may just write the plan
                raise
        self.folder.mkdir(parents=True, exist_ok=True)
        with Lock(self.folder / _LOCK, wait=_WAIT):  # other processes of a job array save, too
            before = self._read()
            plan = replace(self._named_as_in(before), threads=before.get("threads", threads))
            about = {"version": _VERSION, "mode": self.mode, "threads": plan.threads}
            runs = {
                **before.get("runs", {}),
                **{name: dict(own) for name, own in plan.runs.items()},
            }
            shared = dict(self.shared)
            atomic_write_json(self.folder / PLAN, {**about, "shared": shared, "runs": runs})
            lines = [f"{name} = {value!r}\n" for name, value in shared.items()]
            atomic_write_text(self.config, "".join(lines))
        return plan

    def continued(self) -> Sweep:
        """Return the plan with the names that its runs have in the folder; write nothing.

        Raises:
            RunFolderError: the folder holds another sweep, or something else.
        """
        return self._named_as_in(self._read())

    def _read(self) -> dict[str, Any]:
        """Return the plan of the folder, empty without one; it may be extended by more values."""
        file = self.folder / PLAN
        if not file.exists():
            if self.folder.exists() and {path.name for path in self.folder.iterdir()} - {_LOCK}:
                raise RunFolderError(
                    f"{self.folder} holds something else than a sweep: choose another --name"
                )
            return {}
        plan = read_object(file)
        plans = (plan, {"mode": self.mode, "shared": self.shared, "version": _VERSION})
        for part in ("mode", "shared", "version"):
            before, now = (self._fixed(of_plan.get(part)) for of_plan in plans)
            if before != now:
                raise RunFolderError(
                    f"{self.folder} holds another sweep ({_difference(before, now)}): "
                    "choose another --name"
                )
        axes = [
            {field for own in runs.values() for field in own} for runs in (plan["runs"], self.runs)
        ]
        if axes[0] != axes[1]:
            before, now = (", ".join(sorted(fields)).upper() for fields in axes)
            raise RunFolderError(
                f"{self.folder} holds a sweep of other settings (of {before}, and now of {now}): "
                "choose another --name"
            )
        return plan

    def _fixed(self, part: Any) -> Any:
        """Return a part of a plan, settings without those that may change."""
        if not isinstance(part, Mapping):
            return part
        return {name: value for name, value in part.items() if name.lower() not in self.free}

    def _named_as_in(self, plan: Mapping[str, Any]) -> Sweep:
        """Return this sweep with the names that its runs have in a plan."""
        before = {_key(own): name for name, own in plan.get("runs", {}).items()}
        known = {before[_key(own)]: own for own in self.runs.values() if _key(own) in before}
        new = named([own for own in self.runs.values() if _key(own) not in before], before.values())
        name_of = {_key(own): name for name, own in {**known, **new}.items()}
        return replace(
            self,
            runs={name_of[_key(own)]: own for own in self.runs.values()},
            groups={name_of[_key(own)]: self.groups[name] for name, own in self.runs.items()},
        )

    @property
    def config(self) -> Path:
        """The settings file that all runs read."""
        return self.folder / "config.py"

    def arguments(self, name: str) -> list[str]:
        """Return the arguments of `ssl_kd` that train a run, or continue it."""
        place = ["--runs_dir", str(self.folder), "--run_name", name]
        begun = (self.folder / name / "config.json").exists()
        return [
            *(self.mode, "--config", str(self.config), *flags_of(self.runs[name]), *place),
            *(["--resume"] if begun else []),
        ]

    def command(self, name: str) -> str:
        """Return the command that trains a run, for a person to type."""
        return shlex.join(["ssl_kd", *self.arguments(name)])


def shared_settings(resolved: Settings, swept: set[str]) -> dict[str, Any]:
    """Return the settings that a run would not have without them, except those that are swept.

    They are not at their defaults, or are among those that RECIPE sets.
    """
    left_out = {"RUNS_DIR", "RUN_NAME", "RESUME", *(name.upper() for name in swept)}
    recipe = resolved.recipes.get(vars(resolved).get("recipe") or "")
    kept = {name.upper() for name in (recipe.values if recipe else ())}
    defaults = {name.upper(): getattr(type(resolved), name) for name in resolved.rules()}
    values = resolved.to_dict()
    return {
        n: v for n, v in values.items() if n not in left_out and (v != defaults[n] or n in kept)
    }


def check_name(name: str) -> str:
    """Return the name of a sweep; raise InputError if it cannot name a folder."""
    if name in ("", ".", "..", "latest") or "/" in name or "\\" in name:
        raise InputError(f"--name is {name!r}; expected a name without slashes, such as betas")
    return name


def _key(combination: Combination) -> frozenset[tuple[str, str]]:
    """Return what two combinations of the same values have in common, in any order."""
    return frozenset(combination.items())


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                was, new = (
                    repr(values[name]) if name in values else "its default"
                    for values in (before, now)
                )
                return f"{name} was {was}, and is {new}"
    return f"it was {before!r}, and is {now!r}"
