"""Define data sets of images, from folders of files or from arrays."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import release_pages
from ssl_kd.core.files.state import DIGEST_BYTES, FileState
from ssl_kd.core.images.decode import UnreadableImage, decode, find_levels
from ssl_kd.core.images.formats import DEEP, EXTENSIONS, suffix_of, way_to_read
from ssl_kd.core.images.levels import Levels
from ssl_kd.vision.data.usage import SHOWN, LeftOut, Usage, counted

logger = logging.getLogger(__name__)

LARGE = 256 << 20
"""Size in bytes above which a message is logged before reading all data for the fingerprint."""
BLOCK = 1 << 20
"""Number of bytes to read at once."""


@dataclass(eq=False)
class ImageDataset:
    """A data set of images with names and, if known, classes."""

    name: str  # name or path
    split: str  # train or test
    ids: Sequence[str]  # unique; for folders the path relative to the root
    labels: np.ndarray | None  # int64 [n], -1 where unknown; None if no image is labeled
    class_names: tuple[str, ...] | None
    fingerprint: str  # SHA-256 of the content
    arrays: np.ndarray | None = None  # uint8 [n, h, w] or [n, h, w, 3]; None for image files
    left_out: Sequence[LeftOut] = ()  # what of the source is not in the data set

    pictured: ClassVar[bool] = True  # as in FeatureDataset

    @property
    def levels(self) -> Levels:
        """The values of black and white, for images of more than 8 bits."""
        return Levels()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def usage(self) -> Usage:
        """What of the source is used, and what is left out."""
        used = counted(len(self), "image")
        if self.class_names is not None:
            used += f" of {counted(len(self.class_names), 'class', 'classes')}"
        return Usage(used, self.left_out)

    def image_file(self, i: int) -> Path | None:
        """Return the file of image `i`, or None if the images are not separate files."""
        return None

    def image(self, i: int) -> Image.Image:
        """Decode image `i` to mode `L` or `RGB`; raise UnreadableImage."""
        raise NotImplementedError


class ArrayDataset(ImageDataset):
    """A data set of decoded images in one array, uint8 `[n, h, w]` or `[n, h, w, 3]`."""

    def __init__(
        self,
        name: str,
        split: str,
        arrays: np.ndarray,
        labels: np.ndarray | None,
        class_names: tuple[str, ...] | None,
        ids: Sequence[str] | None = None,
    ) -> None:
        if labels is not None:
            labels = np.asarray(labels, dtype=np.int64)
        ids = ids or [f"{name}/{split}/{i}" for i in range(len(arrays))]
        digest, arrays = digest_array(arrays, labels), np.ascontiguousarray(arrays)
        super().__init__(name, split, ids, labels, class_names, digest, arrays)

    def image(self, i: int) -> Image.Image:
        """Return image `i` in mode `L` or `RGB`."""
        assert self.arrays is not None
        return Image.fromarray(self.arrays[i])


class FolderDataset(ImageDataset):
    """A data set of the image files in a folder and its subfolders, or of those in `paths`.

    Hidden files are skipped. A link to an image file is read, also if the file is outside of the
    folder, and `usage` has the number of such links; links among `paths` are not followed out of
    the folder. Links to folders are not entered: reading them raises UnreadableImage. If
    `labeled`, the subfolders of `root` are classes, in the order of `class_names`, and images
    directly in `root` have the label -1; the fingerprint does not depend on `labeled`.

    `levels` are the values of black and white of images with more than 8 bits. By default they
    suit all images of the folder; the fingerprint depends on them.
    """

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
        levels: Levels | None = None,
    ) -> None:
        self.root, self._levels = Path(root), levels
        if not self.root.is_dir():
            raise FileNotFoundError(f"the image folder {self.root} does not exist")
        # A list of files is written by a watch, into whose folder others may put links.
        self.follows_links = paths is None
        if paths is None:
            entries = list(_walk(self.root))
            paths = (path for path, kind in entries if kind == "image")
            left_out = [*left_out, *_not_read(entries)]
        self.paths = sorted(paths)
        if self.paths == [os.curdir]:
            raise PermissionError(errno.EACCES, "the folder cannot be listed", str(self.root))
        if not self.paths:
            others = "".join(f". Not read: {part}" for part in left_out)
            raise FileNotFoundError(
                f"no image in {self.root}; expected {' '.join(sorted(EXTENSIONS))} at any depth"
                f"{others}"
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
        ids = list(map(image_id, self.paths))
        super().__init__(name, split, ids, labels, names, "", left_out=left_out)
        del self.fingerprint  # it is computed when it is first read

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """SHA-256 of the names, sizes and contents of the files, and of unusual `levels`."""
        return with_levels(self._digests[0], self.levels)

    @cached_property
    def levels(self) -> Levels:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values of black and white, for images of more than 8 bits."""
        if self._levels is not None:
            return self._levels
        files = (self.root / path for path in self.paths if suffix_of(path) in DEEP)
        regular = (file for file in files if _is_file(file, self.root, self.follows_links))
        return find_levels(regular)

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
        used = counted(len(self), "image")
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
        if shown := str(self.levels):
            used += f"; {shown}"
        return Usage(used, self.left_out)

    def image_file(self, i: int) -> Path:
        """Return the file of image `i`."""
        return self.root / self.paths[i]

    def image(self, i: int) -> Image.Image:
        """Decode image `i` to mode `L` or `RGB`; raise UnreadableImage."""
        path, follow_links = self.paths[i], self.follows_links
        return read_image(self.root, path, follow_links=follow_links, levels=self.levels)


def read_image(
    root: Path, relative: str, *, follow_links: bool = False, levels: Levels | None = None
) -> Image.Image:
    """Decode an image file below `root` to mode `L` or `RGB`; raise UnreadableImage.

    Unless `follow_links`, a link to a file outside of `root` is not read.
    """
    path, reason = root / relative, ""
    try:
        if path.is_dir() and path.is_symlink():
            reason = "a link to a folder, which is not entered: link its images one by one"
        elif path.is_dir():
            reason = "a folder that cannot be listed"
        elif not follow_links and not is_inside(path, root):
            reason = "a symbolic link that leaves the data folder"
        elif not path.is_file():  # opening a pipe would block
            reason = "a broken link, a folder or a device, not a file"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise UnreadableImage(image_id(relative), reason)
    return decode(path, image_id(relative), levels)


def image_id(path: str) -> str:
    """Return the id of an image: its path relative to the root, printable and with `/`."""
    return _printable(path).replace(os.sep, "/")


def _printable(path: str) -> str:
    # File names that are not UTF-8 are escaped, for messages and CSV files.
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a file is inside the folder `root` after resolving a symbolic link."""
    if not path.is_symlink():
        return True
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def find_images(root: Path, skip: Collection[str] = ()) -> Iterator[str]:
    """Yield the paths of all image files in `root` and its subfolders, relative to `root`.

    `skip` has the names of subfolders of `root` that are not entered.

    Symbolic links to folders are not entered. They, and folders that cannot be listed, are yielded
    as entries, so that reading them reports why they are left out; `.` stands for `root` itself.
    """
    return (path for path, kind in _walk(root, skip) if kind == "image")


def _walk(root: Path, skip: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield each entry below `root` with its kind: `image`, `hidden` or `other`."""
    unlisted: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=unlisted.append):
        hidden = [f for f in folders if f.startswith(".")]
        skipped = skip if folder == os.fspath(root) else ()
        folders[:] = [f for f in folders if f not in hidden and f not in skipped]
        kinds = [(f + os.sep, "hidden") for f in hidden]
        kinds += [(f, "image") for f in folders if os.path.islink(os.path.join(folder, f))]
        for file in files:
            is_image = suffix_of(file) in EXTENSIONS
            kinds.append((file, "hidden" if file[0] == "." else "image" if is_image else "other"))
        for name, kind in kinds:
            yield os.path.join(os.path.relpath(folder, root), name).removeprefix("./"), kind
    for error in unlisted:
        yield os.path.relpath(error.filename, root), "image"


def _not_read(entries: Iterable[tuple[str, str]]) -> list[LeftOut]:
    """Describe the files of a folder that are not read: pictures by their suffix, then others."""
    pictures: dict[str, list[str]] = {}
    hidden: list[str] = []
    others: Counter[str] = Counter()
    for path, kind in sorted(entries):
        suffix = suffix_of(path)
        if kind == "hidden":
            hidden.append(_printable(path))
        elif kind == "other" and way_to_read(suffix) is not None:
            pictures.setdefault(suffix, []).append(_printable(path))
        elif kind == "other":
            others[_printable(suffix) or "without a suffix"] += 1
    left_out = []
    for suffix, names in pictures.items():
        what = counted(len(names), f"file {suffix}", f"files {suffix}")
        left_out.append(LeftOut(what, way_to_read(suffix) or "", names))
    if others:
        suffixes = ", ".join(f"{n:,} {suffix}" for suffix, n in others.most_common(SHOWN))
        left_out.append(LeftOut(counted(others.total(), "other file"), f"no images: {suffixes}"))
    if hidden:
        reason = "names that begin with a dot are skipped"
        left_out.append(LeftOut(f"{len(hidden):,} hidden", reason, hidden))
    return left_out


def _is_file(path: Path, root: Path, follow_links: bool) -> bool:
    try:
        return (follow_links or is_inside(path, root)) and path.is_file()
    except OSError:  # a folder that may be listed but not entered
        return False


def with_levels(digest: str, levels: Levels) -> str:
    """Return the digest of images whose values of more than 8 bits are seen with some levels."""
    if levels == Levels():
        return digest
    return hashlib.sha256(f"{digest} {levels}".encode()).hexdigest()


def digest_array(array: np.ndarray, labels: np.ndarray | None = None) -> str:
    """Compute the SHA-256 of an array (shape, dtype and values) and of its labels."""
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    _log_if_large(array.nbytes)
    rows = max(1, BLOCK * len(array) // max(array.nbytes, 1))
    for start in range(0, len(array), rows):
        digest.update(np.ascontiguousarray(array[start : start + rows]).data)
        release_pages(array)
    if labels is not None:
        digest.update(np.ascontiguousarray(labels).data)
    return digest.hexdigest()


def digest_files(
    root: Path, paths: Sequence[str], *, follow_links: bool = False
) -> tuple[str, list[tuple[FileState, bytes] | None]]:
    """Compute the SHA-256 of the names, sizes and contents of files, ignoring their times.

    Also return the state of each file, and a digest of its content alone; None for an entry that is
    not a readable file.
    """
    digest = hashlib.sha256()
    total = 0
    for path in paths:
        file = root / path
        size = file.stat().st_size if _is_file(file, root, follow_links) else -1
        digest.update(f"{size} ".encode() + os.fsencode(path) + b"\0")
        total += max(size, 0)
    _log_if_large(total)
    files: list[tuple[FileState, bytes] | None] = []
    for path in paths:
        file, own = root / path, hashlib.sha256()
        state = FileState.of(file) if _is_file(file, root, follow_links) else None
        try:
            if state is not None:
                with open(file, "rb", buffering=0) as content:
                    while block := content.read(BLOCK):
                        digest.update(block)
                        own.update(block)
        except OSError as error:  # reported when the image is decoded
            digest.update(type(error).__name__.encode())
            state = None
        files.append(None if state is None else (state, own.digest()[:DIGEST_BYTES]))
    return digest.hexdigest(), files


def _log_if_large(size: int) -> None:
    if size > LARGE:
        logger.info("reading all %.1f GiB of the data to compute its fingerprint", size / 2**30)
