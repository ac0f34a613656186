"""The manifests of a cache: that of the finished cache and that of unfinished writers."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from ssl_kd.files import CorruptFileError, sync_folder
from ssl_kd.files.lock import Lock
from ssl_kd.store.fingerprint import BaseFingerprint, FingerprintMismatch
from ssl_kd.store.shards import Manifest, ShardStore, shard_file, write_manifest

logger = logging.getLogger(__name__)

# To change the manifest and rename files, which takes milliseconds.
SECONDS_TO_WAIT = 120


class Ledger:
    """The two manifests of a cache, read and changed by any number of writers on any machines.

    Finished content is in `folder`, unfinished content in `partial`, whose manifest lists the
    complete shards. It is changed under a lock that is held for milliseconds, so no entry is lost;
    if two writers compute a shard, the first one's is kept.

    The arguments are those of `ShardWriter`, except `shared`: whether other writers store other
    shards.

    Attributes:
        partial: the folder of unfinished content.
        header: as given; `look` updates adopted fields.
        shard_rows: as given; a cache of the same fingerprint keeps its own.
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
        self.kind, self.folder, self.name, self.fingerprint = kind, folder, name, fingerprint
        self.header, self.shard_rows = header, shard_rows
        self.force, self.rebuild, self._shared = force, rebuild, shared
        self._anew: dict[str, bool] = {}  # in the manifest of `partial`: the finished is ignored
        self.partial = folder / f"{name}.partial"
        self._adopt = adopt
        self._refused: Collection[Manifest] = ()
        self._changing = Lock(folder / f".{name}.change.lock", wait=SECONDS_TO_WAIT)

    @property
    def n_shards(self) -> int:
        """Number of shards of the whole data set."""
        return -(-self.header["n"] // self.shard_rows)

    def shard_of(self, entry: Manifest) -> int:
        """Return the number of an entry's shard."""
        return entry["start"] // self.shard_rows

    def rows(self, shard: int) -> tuple[int, int]:
        """Return the rows of the data set in a shard, `(start, stop)`."""
        return shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.header["n"])

    def file(self, shard: int) -> str:
        """Return the file name of a shard."""
        return shard_file(self.name, shard, self.n_shards)

    def paths(self, entry: Manifest, place: Path) -> list[Path]:
        """Return where the file of an entry in the manifest of `place` may be."""
        # A writer killed while publishing has already moved some of its shards to the folder.
        places = [self.folder] if place == self.folder else [self.partial, self.folder]
        return [folder / entry["file"] for folder in places]

    def look(self) -> dict[Path, Manifest]:
        """Return the manifests of this cache by folder, and adopt the form of the first.

        Raises:
            FingerprintMismatch: there is only a cache of something else, and not `force`.
            CorruptFileError: the finished manifest is damaged, and not `force`.
        """
        same, foreign = self._read(begin=True)
        if self.force:  # a share joins the others' new cache
            is_joined = self._shared and "anew" in same.get(self.partial, {})
            same = {self.partial: same[self.partial]} if is_joined else {}
        elif foreign and not same:
            raise next(iter(foreign.values()))
        for first in list(same.values())[:1]:
            self.shard_rows = first["shard_rows"]
            self.header |= {name: first[name] for name in self._adopt}
        return self._fitting(same)

    def begin_anew(self, shards: Collection[int], join: bool) -> None:
        """Start a new cache, even if a complete one exists.

        Args:
            shards: to be computed by this writer.
            join: keep what other writers of the new cache have stored.
        """
        with self._changing:
            same = self.look() if join else {}
            if not same:
                shutil.rmtree(self.partial, ignore_errors=True)
            self._anew = {"anew": True} if self._shared else {}
            listed = same[self.partial]["shards"] if same else []
            numbered = {self.shard_of(entry): entry for entry in listed}
            self._list({n: entry for n, entry in numbered.items() if n not in shards})

    def begin(self, stored: Mapping[int, Manifest], refused: Collection[Manifest]) -> None:
        """Start writing: join unfinished writers of this cache, or start a new one.

        Args:
            stored: entries of intact shards.
            refused: entries of shards that have to be recomputed.
        """
        self._refused = refused
        with self._changing:
            same = self.look()
            if len(self._published(same)) < self.n_shards:  # else another writer finished
                self._join(same, stored, refused)

    def add(self, ready: Path, entry: Manifest, stored: Mapping[int, Manifest]) -> Manifest:
        """Enter a shard unless another writer has; a published shard is not changed.

        Args:
            ready: its file, which is moved or removed.
            entry: its entry in the manifest.
            stored: entries of other shards, in case the manifest is gone.

        Returns:
            The entry that counts.

        Raises:
            FingerprintMismatch: writers of another cache have replaced it.
            FileNotFoundError: another writer has published the cache, and removed `ready` with it.
        """
        shard = self.shard_of(entry)
        with self._changing:
            same, foreign = self._read()
            if self.partial in foreign:
                raise foreign[self.partial]
            same = self._fitting(same)
            if shard in (published := self._published(same)):
                ready.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it contains others' files
                    self.partial.rmdir()
                return published[shard]
            entries = self._join(same, stored)
            if shard not in entries:
                os.replace(ready, self.partial / entry["file"])
                self._list(entries | {shard: entry})
            for left in self.partial.glob(f"*{entry['file']}.*.tmp"):  # of killed writers, too
                left.unlink(missing_ok=True)
        return entries.get(shard, entry)

    def publish(self) -> Manifest | None:
        """Make the cache visible if all its shards are stored, by any writer.

        Returns:
            Its manifest; None if a shard is missing.
        """
        with self._changing:
            same = self._fitting(self._read()[0])
            listed = [(entry, place) for place, found in same.items() for entry in found["shards"]]
            if len({self.shard_of(entry) for entry, _ in listed}) < self.n_shards:
                return None
            entries = {  # the unfinished writers' come last, and win
                self.shard_of(entry): entry
                for entry, place in listed
                if any(_has_size(path, entry["bytes"]) for path in self.paths(entry, place))
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
        """Return the manifests of this cache, and how those of another cache differ."""
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
                    logger.warning("%s Starting over.", error)
                continue
            if differences := self._differences(manifest, cached):
                if place == self.folder or manifest["shards"]:  # otherwise nothing would be lost
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
            f"{name}: cache has {manifest.get(name)}, this run asks for {value}"
            for name, value in self.header.items()
            if name not in ("version", "fingerprint", *self._adopt) and manifest.get(name) != value
        ]

    def _fitting(self, same: dict[Path, Manifest]) -> dict[Path, Manifest]:
        form = {"shard_rows": self.shard_rows, **{name: self.header[name] for name in self._adopt}}
        return {
            place: manifest for place, manifest in same.items() if form.items() <= manifest.items()
        }

    def _published(self, same: Mapping[Path, Manifest]) -> dict[int, Manifest]:
        """Return the shards of the finished cache, except those refused by this writer."""
        listed = same[self.folder]["shards"] if self.folder in same else []
        return {self.shard_of(entry): entry for entry in listed if entry not in self._refused}

    def _join(
        self,
        same: Mapping[Path, Manifest],
        stored: Mapping[int, Manifest],
        refused: Collection[Manifest] = (),
    ) -> dict[int, Manifest]:
        """Return the entries of the unfinished manifest with `stored`; create it if necessary."""
        listed: dict[int, Manifest] | None = None
        if self.partial in same:
            listed = {self.shard_of(entry): entry for entry in same[self.partial]["shards"]}
        elif self._path(self.partial).exists():  # of another cache
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
        """Move all files to their final place, the manifest last.

        If killed in between, the next writer finds each shard in one place or the other.
        """
        write_manifest(self._path(self.partial), manifest)
        current = [entry["file"] for entry in manifest["shards"]]
        for file in current:
            if (self.partial / file).exists():
                os.replace(self.partial / file, self.folder / file)
        sync_folder(self.folder)
        os.replace(self._path(self.partial), self._path(self.folder))
        sync_folder(self.folder)
        shutil.rmtree(self.partial, ignore_errors=True)  # another may be writing there
        for path in self.folder.glob(f"{self.name}*.pt"):
            is_shard = re.fullmatch(rf"{self.name}(_\d{{5}})?\.pt", path.name)
            if is_shard and path.name not in current:  # of a cache that this one replaced
                path.unlink()


def _has_size(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size
