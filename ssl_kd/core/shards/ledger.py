"""Coordinate several writers of one cache through its manifests."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from ssl_kd.core.files import CorruptFileError, sync_folder
from ssl_kd.core.files.lock import Lock
from ssl_kd.core.shards.fingerprint import BaseFingerprint, FingerprintMismatch
from ssl_kd.core.shards.shards import Manifest, ShardStore, shard_file, write_manifest

logger = logging.getLogger(__name__)

SECONDS_TO_WAIT = 120  # for the lock on the manifest, which is held for milliseconds


class Ledger:
    """Read and update the two manifests of a cache for any number of writers on any machines.

    The finished cache is in `folder`. The unfinished one is in `partial`, with a manifest that
    lists the complete shards. Manifests are changed under a lock, so no entry is lost; if two
    writers compute the same shard, the first one is kept. `shared` says whether other writers store
    other shards; see `ShardWriter` for the other arguments.
    """

    def __init__(
        self,
        kind: type[ShardStore],
        folder: Path,
        name: str,
        fingerprint: BaseFingerprint,
        header: Manifest,
        *,
        shard_rows: int,
        adopt: Collection[str] = (),
        force: bool = False,
        rebuild: bool = False,
        shared: bool = False,
    ):
        self.kind = kind
        self.folder = folder
        self.name = name
        self.fingerprint = fingerprint
        self.header, self._adopt = header, adopt  # `look` updates the fields in `adopt`
        self.shard_rows = shard_rows  # `look` takes it from an existing cache
        self.force = force
        self.rebuild = rebuild
        self._shared = shared
        self._anew: dict[str, bool] = {}  # marks an unfinished cache that replaces the finished one
        self.partial = folder / f"{name}.partial"
        self._refused: Collection[Manifest] = ()
        self._changing = Lock(folder / f".{name}.change.lock", wait=SECONDS_TO_WAIT)

    @property
    def n_shards(self) -> int:
        """Number of shards of the whole data set."""
        return -(-self.header["n"] // self.shard_rows)

    def shard_of(self, entry: Manifest) -> int:
        """Return the shard number of a manifest entry."""
        return entry["start"] // self.shard_rows

    def rows(self, shard: int) -> tuple[int, int]:
        """Return the rows of the data set that a shard covers, as `(start, stop)`."""
        return shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.header["n"])

    def file(self, shard: int) -> str:
        """Return the file name of a shard."""
        return shard_file(self.name, shard, self.n_shards)

    def paths(self, entry: Manifest, place: Path) -> list[Path]:
        """Return the possible paths of a shard that the manifest in the folder `place` lists."""
        # A writer that was killed while publishing has already moved some shards.
        places = [self.folder] if place == self.folder else [self.partial, self.folder]
        return [folder / entry["file"] for folder in places]

    def look(self) -> dict[Path, Manifest]:
        """Read the manifests of this cache, by folder, and adopt the shard size of the first one.

        Without `force`, raises FingerprintMismatch if the existing cache was computed from other
        inputs and CorruptFileError if the manifest of the finished cache is damaged.
        """
        same, foreign = self._read(begin=True)
        if self.force:  # a writer of some shards joins the new cache of the others
            is_joined = self._shared and "anew" in same.get(self.partial, {})
            same = {self.partial: same[self.partial]} if is_joined else {}
        elif foreign and not same:
            raise next(iter(foreign.values()))
        for first in list(same.values())[:1]:
            self.shard_rows = first["shard_rows"]
            self.header |= {name: first[name] for name in self._adopt}
        return self._fitting(same)

    def begin_anew(self, shards: Collection[int], join: bool) -> None:
        """Start a new cache; with `join`, keep the shards of other writers of an unfinished one."""
        with self._changing:
            same = self.look() if join else {}
            if not same:
                shutil.rmtree(self.partial, ignore_errors=True)
            self._anew = {"anew": True} if self._shared else {}
            listed = same[self.partial]["shards"] if same else []
            numbered = {self.shard_of(entry): entry for entry in listed}
            self._list({n: entry for n, entry in numbered.items() if n not in shards})

    def begin(self, stored: Mapping[int, Manifest], refused: Collection[Manifest]) -> None:
        """Start writing: join the unfinished cache of other writers, or start a new one.

        `stored` are intact shards by number, `refused` those that have to be recomputed.
        """
        self._refused = refused
        with self._changing:
            same = self.look()
            if len(self._published(same)) < self.n_shards:  # else another writer finished
                self._join(same, stored, refused)

    def add(self, ready: Path, entry: Manifest, stored: Mapping[int, Manifest]) -> Manifest:
        """Add the shard in the file `ready` to the manifest, unless another writer has done so.

        Returns the entry that the manifest now contains. `stored` are the entries of other shards,
        in case the manifest was removed. Raises FingerprintMismatch if other writers have replaced
        the cache by one of other inputs, and FileNotFoundError if another writer has published the
        cache and removed `ready`.
        """
        shard = self.shard_of(entry)
        with self._changing:
            same, foreign = self._read()
            if self.partial in foreign:
                raise foreign[self.partial]
            same = self._fitting(same)
            if shard in (published := self._published(same)):
                ready.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # other writers' files are in it
                    self.partial.rmdir()
                return published[shard]
            entries = self._join(same, stored)
            if shard not in entries:
                os.replace(ready, self.partial / entry["file"])
                self._list(entries | {shard: entry})
            for temporary in self.partial.glob(f"*{entry['file']}.*.tmp"):  # also of killed writers
                temporary.unlink(missing_ok=True)
        return entries.get(shard, entry)

    def publish(self) -> Manifest | None:
        """Move a complete cache to its final folder; return the manifest, or None if incomplete."""
        with self._changing:
            same = self._fitting(self._read()[0])
            listed = [(entry, place) for place in same for entry in same[place]["shards"]]
            if len({self.shard_of(entry) for entry, _ in listed}) < self.n_shards:
                return None
            entries = {  # unfinished shards come last and override
                self.shard_of(entry): entry
                for entry, place in listed
                if any(
                    path.exists() and path.stat().st_size == entry["bytes"]
                    for path in self.paths(entry, place)
                )
            }
            if len(entries) < self.n_shards:
                return None
            manifest = self._manifest(entries)
            if self.partial in same:
                self._move(manifest)
        return manifest

    def _read(
        self, begin: bool = False
    ) -> tuple[dict[Path, Manifest], dict[Path, FingerprintMismatch]]:
        """Read both manifests; return those of this cache, and errors for those of another one."""
        same: dict[Path, Manifest] = {}
        foreign: dict[Path, FingerprintMismatch] = {}
        for place in (self.folder, self.partial):
            path = self._path(place)
            try:
                manifest, cached = self.kind.describe(path)
            except FileNotFoundError:
                continue
            except CorruptFileError as error:
                if begin and place == self.folder and not (self.force or self.rebuild):
                    raise
                if begin and not self.force:
                    logger.warning("%s All shards are computed again.", error)
                continue
            if differences := self._differences(manifest, cached):
                if place == self.folder or manifest["shards"]:  # an empty one may be replaced
                    way_out = self.fingerprint.way_out
                    foreign[place] = FingerprintMismatch(path, differences, way_out)
            else:
                same[place] = manifest
        self._anew = {"anew": True} if "anew" in same.get(self.partial, {}) else {}
        if (self._shared and self._anew) or (self.force and not self._shared):
            same.pop(self.folder, None)
        return same, foreign

    def _differences(self, manifest: Manifest, cached: BaseFingerprint) -> list[str]:
        return cached.differences(self.fingerprint) + [
            f"{name}: cache has {manifest.get(name)}, this run needs {value}"
            for name, value in self.header.items()
            if name not in ("version", "fingerprint", *self._adopt) and manifest.get(name) != value
        ]

    def _fitting(self, same: dict[Path, Manifest]) -> dict[Path, Manifest]:
        form = {"shard_rows": self.shard_rows, **{name: self.header[name] for name in self._adopt}}
        return {
            place: manifest for place, manifest in same.items() if form.items() <= manifest.items()
        }

    def _published(self, same: Mapping[Path, Manifest]) -> dict[int, Manifest]:
        """Return the entries of the finished cache, except those that this writer recomputes."""
        listed = same[self.folder]["shards"] if self.folder in same else []
        return {self.shard_of(entry): entry for entry in listed if entry not in self._refused}

    def _join(
        self,
        same: Mapping[Path, Manifest],
        stored: Mapping[int, Manifest],
        refused: Collection[Manifest] = (),
    ) -> dict[int, Manifest]:
        """Add `stored` to the manifest of the unfinished cache, and return all its entries."""
        listed: dict[int, Manifest] | None = None
        if self.partial in same:
            listed = {self.shard_of(entry): entry for entry in same[self.partial]["shards"]}
        elif self._path(self.partial).exists():  # it belongs to another cache
            shutil.rmtree(self.partial, ignore_errors=True)
        intact = {n: entry for n, entry in (listed or {}).items() if entry not in refused}
        entries = {**stored, **intact}
        if entries != listed:
            self._list(entries)
        return entries

    def _list(self, entries: Mapping[int, Manifest]) -> None:
        write_manifest(self._path(self.partial), self._manifest(entries) | self._anew)

    def _path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def _manifest(self, stored: Mapping[int, Manifest]) -> Manifest:
        entries = [stored[shard] for shard in sorted(stored)]
        return self.header | {
            "shard_rows": self.shard_rows,
            "unreadable": [sample for entry in entries for sample in entry["unreadable"]],
            "statistics": self.kind.total(entries),
            "shards": entries,
        }

    def _move(self, manifest: Manifest) -> None:
        """Move all files to the final folder, the manifest last.

        If this process is killed in between, the next writer finds each shard in either folder.
        """
        write_manifest(self._path(self.partial), manifest)
        current = [entry["file"] for entry in manifest["shards"]]
        for file in current:
            if (self.partial / file).exists():
                os.replace(self.partial / file, self.folder / file)
        sync_folder(self.folder)
        os.replace(self._path(self.partial), self._path(self.folder))
        sync_folder(self.folder)
        shutil.rmtree(self.partial, ignore_errors=True)  # another writer may use it
        for path in self.folder.glob(f"{self.name}*.pt"):
            is_shard = re.fullmatch(rf"{self.name}(_\d{{5}})?\.pt", path.name)
            if is_shard and path.name not in current:  # of the replaced cache
                path.unlink()
