"""Define data sets of images, from folders of files or from arrays."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from ssl_kd.datasets.decode import UnreadableImage, decode
from ssl_kd.datasets.usage import LeftOut, Usage, counted
from ssl_kd.errors import InputError
from ssl_kd.files import release_pages
from ssl_kd.files.state import DIGEST_BYTES, FileState

logger = logging.getLogger(__name__)

EXTENSIONS = frozenset(
    ".jpg .jpeg .jfif .png .bmp .gif .webp .tif .tiff .ppm .pgm .pbm .pnm".split()
)
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

    Hidden files are skipped. Symbolic links that leave the folder are listed but not followed:
    reading such an image raises UnreadableImage. If `labelled`, the subfolders of `root` are
    classes, in the order of `class_names`, and images directly in `root` have the label -1; the
    fingerprint does not depend on `labelled`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        name: str,
        split: str,
        *,
        labelled: bool = False,
        class_names: tuple[str, ...] | None = None,
        paths: Iterable[str] | None = None,
    ) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"the image folder {self.root} does not exist")
        self.paths = sorted(find_images(self.root) if paths is None else paths)
        if self.paths == [os.curdir]:
            raise PermissionError(errno.EACCES, "the folder cannot be listed", str(self.root))
        if not self.paths:
            raise FileNotFoundError(
                f"no image in {self.root}; expected {' '.join(sorted(EXTENSIONS))} at any depth"
            )
        first = [
            _printable(path.split(os.sep)[0]) if os.sep in path else None for path in self.paths
        ]
        self.folders = tuple(sorted({folder for folder in first if folder is not None}))
        names, labels = None, None
        if labelled and self.folders:
            names = self.folders if class_names is None else tuple(map(_printable, class_names))
            if unknown := sorted(set(self.folders) - set(names)):
                raise InputError(
                    f"{self.root} has the class folders {unknown[:5]}; expected those of the "
                    f"training split, {list(names)[:10]}"
                )
            number = {name: i for i, name in enumerate(names)}
            labels = np.array([-1 if c is None else number[c] for c in first], dtype=np.int64)
        ids = list(map(image_id, self.paths))
        super().__init__(name, split, ids, labels, names, "")
        del self.fingerprint  # it is computed when it is first read

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """SHA-256 of the names, sizes and contents of the files."""
        return self._digests[0]

    @property
    def files(self) -> Sequence[tuple[FileState, bytes] | None]:
        """State and digest of each file; None for an entry that is not a readable file."""
        return self._digests[1]

    @cached_property
    def _digests(self) -> tuple[str, list[tuple[FileState, bytes] | None]]:
        return digest_files(self.root, self.paths)

    def image_file(self, i: int) -> Path:
        """Return the file of image `i`."""
        return self.root / self.paths[i]

    def image(self, i: int) -> Image.Image:
        """Decode image `i` to mode `L` or `RGB`; raise UnreadableImage."""
        return read_image(self.root, self.paths[i])


def read_image(root: Path, relative: str) -> Image.Image:
    """Decode an image file below `root` to mode `L` or `RGB`; raise UnreadableImage."""
    path, reason = root / relative, ""
    try:
        if not is_inside(path, root):
            reason = "a symbolic link that leaves the data folder"
        elif path.is_dir() and not path.is_symlink():
            reason = "a folder that cannot be listed"
        elif not path.is_file():  # opening a pipe would block
            reason = "a broken link, a folder or a device, not a file"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise UnreadableImage(image_id(relative), reason)
    return decode(path, image_id(relative))


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


def find_images(root: Path) -> Iterator[str]:
    """Yield the paths of all image files in `root` and its subfolders, relative to `root`.

    Symbolic links to folders are not entered. They, and folders that cannot be listed, are yielded
    as entries, so that reading them reports why they are left out; `.` stands for `root` itself.
    """
    unlisted: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=unlisted.append):
        folders[:] = [f for f in folders if not f.startswith(".")]
        links = [f for f in folders if os.path.islink(os.path.join(folder, f))]
        for file in files + links:
            is_image = os.path.splitext(file)[1].lower() in EXTENSIONS and not file.startswith(".")
            if is_image or file in links:
                yield os.path.relpath(os.path.join(folder, file), root)
    for error in unlisted:
        yield os.path.relpath(error.filename, root)


def _is_file(path: Path, root: Path) -> bool:
    try:
        return is_inside(path, root) and path.is_file()
    except OSError:  # a folder that may be listed but not entered
        return False


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
    root: Path, paths: Sequence[str]
) -> tuple[str, list[tuple[FileState, bytes] | None]]:
    """Compute the SHA-256 of the names, sizes and contents of files, ignoring their times.

    Also return the state of each file, and a digest of its content alone; None for an entry that is
    not a readable file.
    """
    digest = hashlib.sha256()
    total = 0
    for path in paths:
        file = root / path
        size = file.stat().st_size if _is_file(file, root) else -1
        digest.update(f"{size} ".encode() + os.fsencode(path) + b"\0")
        total += max(size, 0)
    _log_if_large(total)
    files: list[tuple[FileState, bytes] | None] = []
    for path in paths:
        file, own = root / path, hashlib.sha256()
        state = FileState.of(file) if _is_file(file, root) else None
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
