"""Find the files of one kind in a folder, and define the data set of them."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from ssl_kd.core.errors import InputError
from ssl_kd.core.files.state import FileState
from ssl_kd.core.images.formats import suffix_of
from ssl_kd.vision.data.digests import digest_files, is_inside
from ssl_kd.vision.data.samples import NOUNS, SampleDataset
from ssl_kd.vision.data.usage import SHOWN, LeftOut, Usage, counted


class FileFolder(SampleDataset):
    """A data set of the files of one kind in a folder and its subfolders, or of those in `paths`.

    Hidden files are skipped. A link to such a file is read, also if the file is outside of the
    folder, and `usage` has the number of such links; links among `paths` are not followed out of
    the folder. Links to folders are not entered: reading them raises UnreadableSample. If
    `labeled`, the subfolders of `root` are classes, in the order of `class_names`, and files
    directly in `root` have the label -1; the fingerprint does not depend on `labeled`.
    """

    suffixes: ClassVar[Collection[str]]
    """Suffixes of the files that are read, in lower case."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        name: str,
        split: str,
        *,
        labeled: bool = False,
        class_names: tuple[str, ...] | None = None,
        paths: Iterable[str] | None = None,
        left_out: Sequence[LeftOut] = (),
    ) -> None:
        self.root, noun = Path(root), NOUNS[self.kind]
        if not self.root.is_dir():
            raise FileNotFoundError(f"the {noun} folder {self.root} does not exist")
        # A list of files is written by a watch, into whose folder others may put links.
        self.follows_links = paths is None
        if paths is None:
            entries = list(_walk(self.root, self.suffixes))
            paths = (path for path, kind in entries if kind == "read")
            left_out = [*left_out, *self._not_read(entries)]
        self.paths = sorted(paths)
        if self.paths == [os.curdir]:
            raise PermissionError(errno.EACCES, "the folder cannot be listed", str(self.root))
        if not self.paths:
            others = "".join(f". Not read: {part}" for part in left_out)
            raise FileNotFoundError(
                f"no {noun} in {self.root}; expected {' '.join(sorted(self.suffixes))} at any "
                f"depth{others}"
            )
        first = [
            _printable(path.split(os.sep)[0]) if os.sep in path else None for path in self.paths
        ]
        self.folders = tuple(sorted({folder for folder in first if folder is not None}))
        names, labels = None, None
        if labeled and self.folders:
            names = self.folders if class_names is None else tuple(map(_printable, class_names))
            if unknown := sorted(set(self.folders) - set(names)):
                raise InputError(
                    f"{self.root} has the class folders {unknown[:5]}; expected those of the "
                    f"training split, {list(names)[:10]}"
                )
            number = {name: i for i, name in enumerate(names)}
            labels = np.array([-1 if c is None else number[c] for c in first], dtype=np.int64)
        ids = list(map(file_id, self.paths))
        super().__init__(name, split, ids, labels, names, "", left_out=left_out)
        del self.fingerprint  # it is computed when it is first read

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """SHA-256 of the names, sizes and contents of the files."""
        return self.digest

    @property
    def digest(self) -> str:
        """SHA-256 of the names, sizes and contents of the files."""
        return self._digests[0]

    @property
    def files(self) -> Sequence[tuple[FileState, bytes] | None]:
        """State and digest of each file; None for an entry that is not a readable file."""
        return self._digests[1]

    @cached_property
    def _digests(self) -> tuple[str, list[tuple[FileState, bytes] | None]]:
        return digest_files(self.root, self.paths, follow_links=self.follows_links)

    @property
    def usage(self) -> Usage:
        """What of the folder is used, and what is left out."""
        return Usage(self.used, self.left_out)

    @property
    def used(self) -> str:
        """What of the folder is used."""
        used = counted(len(self), NOUNS[self.kind])
        if self.class_names is not None:
            used += f" of {counted(len(self.class_names), 'class', 'classes')}"
        elif self.folders:
            used += f" in {counted(len(self.folders), 'folder')}"
        files = [self.root / path for path in self.paths] if self.follows_links else []
        links = [file for file in files if file.is_file() and not is_inside(file, self.root)]
        if links:
            places = sorted({os.path.dirname(os.path.realpath(link)) for link in links})
            more = f" and {len(places) - 1:,} more" if len(places) > 1 else ""
            used += f", {len(links):,} of them links to files in {places[0]}{more}"
        return used

    def file(self, i: int) -> Path:
        """Return the file of sample `i`, which is not read."""
        return self.root / self.paths[i]

    @staticmethod
    def way_to_read(suffix: str) -> str | None:
        """Return how to use files of the kind with a suffix that is not read; None for others."""
        raise NotImplementedError

    def _not_read(self, entries: Iterable[tuple[str, str]]) -> list[LeftOut]:
        """Describe the files that are not read: those of the kind by their suffix, then others."""
        of_kind: dict[str, list[str]] = {}
        hidden: list[str] = []
        others: Counter[str] = Counter()
        for path, kind in sorted(entries):
            suffix = suffix_of(path)
            if kind == "hidden":
                hidden.append(_printable(path))
            elif kind == "other" and self.way_to_read(suffix) is not None:
                of_kind.setdefault(suffix, []).append(_printable(path))
            elif kind == "other":
                others[_printable(suffix) or "without a suffix"] += 1
        left_out = []
        for suffix, names in of_kind.items():
            what = counted(len(names), f"file {suffix}", f"files {suffix}")
            left_out.append(LeftOut(what, self.way_to_read(suffix) or "", names))
        if others:
            shown = ", ".join(f"{n:,} {suffix}" for suffix, n in others.most_common(SHOWN))
            what = counted(others.total(), "other file")
            left_out.append(LeftOut(what, f"no {NOUNS[self.kind]}s: {shown}"))
        if hidden:
            reason = "names that begin with a dot are skipped"
            left_out.append(LeftOut(f"{len(hidden):,} hidden", reason, hidden))
        return left_out


def why_not_read(path: Path, root: Path, *, follow_links: bool = False) -> str:
    """Return why the file of a sample is not read; an empty string if it may be read.

    Unless `follow_links`, a link to a file outside of `root` is not read.
    """
    try:
        if path.is_dir() and path.is_symlink():
            return "a link to a folder, which is not entered: link its files one by one"
        if path.is_dir():
            return "a folder that cannot be listed"
        if not follow_links and not is_inside(path, root):
            return "a symbolic link that leaves the data folder"
        if not path.is_file():  # opening a pipe would block
            return "a broken link, a folder or a device, not a file"
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def file_id(path: str) -> str:
    """Return the id of a sample: the path of its file, relative to the root, with `/`."""
    return _printable(path).replace(os.sep, "/")


def find_files(root: Path, suffixes: Collection[str], skip: Collection[str] = ()) -> Iterator[str]:
    """Yield the paths of all files with some suffixes in `root` and its subfolders.

    They are relative to `root`. `skip` has the names of subfolders that are not entered. Symbolic
    links to folders are not entered. They, and folders that cannot be listed, are yielded as
    entries, so that reading them reports why they are left out; `.` stands for `root` itself.
    """
    return (path for path, kind in _walk(root, suffixes, skip) if kind == "read")


def _walk(
    root: Path, suffixes: Collection[str], skip: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield each entry below `root` with its kind: `read`, `hidden` or `other`."""
    unlisted: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=unlisted.append):
        hidden = [f for f in folders if f.startswith(".")]
        skipped = skip if folder == os.fspath(root) else ()
        folders[:] = [f for f in folders if f not in hidden and f not in skipped]
        kinds = [(f + os.sep, "hidden") for f in hidden]
        kinds += [(f, "read") for f in folders if os.path.islink(os.path.join(folder, f))]
        for file in files:
            is_read = suffix_of(file) in suffixes
            kinds.append((file, "hidden" if file[0] == "." else "read" if is_read else "other"))
        for name, kind in kinds:
            yield os.path.join(os.path.relpath(folder, root), name).removeprefix("./"), kind
    for error in unlisted:
        yield os.path.relpath(error.filename, root), "read"


def _printable(path: str) -> str:
    # File names that are not UTF-8 are escaped, for messages and CSV files.
    return os.fsencode(path).decode("utf-8", "backslashreplace")
