"""Data sets of images: folders of files, and decoded arrays."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ssl_kd.datasets.decode import UnreadableImage, decode
from ssl_kd.errors import InputError
from ssl_kd.files import release_pages

logger = logging.getLogger(__name__)

EXTENSIONS = frozenset(
    ".jpg .jpeg .jfif .png .bmp .gif .webp .tif .tiff .ppm .pgm .pbm .pnm".split()
)
LARGE = 256 << 20
"""Bytes beyond which reading a data set for its fingerprint is logged."""
BLOCK = 1 << 20
"""Bytes read at a time."""


class ImageDataset:
    """Images with names and, if known, classes.

    Attributes:
        name: the data set, as given by the user.
        split: `train` or `test`.
        ids: one unique name per image; in folders the path below the root.
        labels: int64 `[n]`, -1 where unknown; None if nothing is labeled.
        class_names: name of each class, or None.
        arrays: uint8 `[n, h, w]` or `[n, h, w, 3]` of decoded images, else None.
        fingerprint: identity of the content, see `digest_array` and `digest_files`.
    """

    def __init__(
        self,
        name: str,
        split: str,
        ids: Sequence[str],
        labels: np.ndarray | None,
        class_names: tuple[str, ...] | None,
        fingerprint: str,
        arrays: np.ndarray | None = None,
    ) -> None:
        self.name = name
        self.split = split
        self.ids = list(ids)
        self.labels = labels
        self.class_names = class_names
        self.fingerprint = fingerprint
        self.arrays = arrays

    pictured = True  # as a FeatureDataset may be

    def __len__(self) -> int:
        return len(self.ids)

    def image_file(self, i: int) -> Path | None:
        """Return the file of image `i`; None if it is not a separate file."""
        return None

    def image(self, i: int) -> Image.Image:
        """Decode image `i` to mode `L` or `RGB`; raise UnreadableImage."""
        raise NotImplementedError


class ArrayDataset(ImageDataset):
    """Decoded images: digits, CIFAR, STL-10, Fashion-MNIST.

    Args:
        name: the data set, as given by the user.
        split: `train` or `test`.
        arrays: uint8 `[n, h, w]` or `[n, h, w, 3]`.
        labels: integers `[n]`, or None.
        class_names: name of each class.
        ids: names of the images; None: `name/split/number`.
    """

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
        super().__init__(
            name,
            split,
            ids or [f"{name}/{split}/{i}" for i in range(len(arrays))],
            labels,
            class_names,
            digest_array(arrays, labels),
            np.ascontiguousarray(arrays),
        )

    def image(self, i: int) -> Image.Image:
        """Return image `i` in mode `L` or `RGB`."""
        assert self.arrays is not None
        return Image.fromarray(self.arrays[i])


class FolderDataset(ImageDataset):
    """All image files below a folder; if `labelled`, the first folder level is the class.

    Files directly in the folder have no class (label -1). Symbolic links out of the folder are not
    followed: they stay in the list and read as `UnreadableImage`. Hidden files are skipped. The
    fingerprint does not depend on `labelled`.

    Args:
        root: the folder.
        name: the data set, as given by the user.
        split: `train` or `test`.
        labelled: whether folders are classes.
        class_names: the order of classes, if another split has set it.

    Attributes:
        folders: the folders of the first level that contain an image, sorted.

    Raises:
        FileNotFoundError: no folder, or no image in it.
        PermissionError: it cannot be listed.
        ValueError: a class that is not among `class_names`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        name: str,
        split: str,
        *,
        labelled: bool = False,
        class_names: tuple[str, ...] | None = None,
    ) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"no folder {self.root}")
        self.paths = sorted(find_images(self.root))
        if self.paths == [os.curdir]:
            raise PermissionError(errno.EACCES, "the folder cannot be listed", str(self.root))
        if not self.paths:
            raise FileNotFoundError(
                f"no image in {self.root}: looked for {' '.join(sorted(EXTENSIONS))} at any depth"
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
                    f"{self.root} has class folders {unknown[:5]} that the training split lacks; "
                    f"it has {list(names)[:10]}"
                )
            number = {name: i for i, name in enumerate(names)}
            labels = np.array([-1 if c is None else number[c] for c in first], dtype=np.int64)
        super().__init__(
            name,
            split,
            [_printable(path).replace(os.sep, "/") for path in self.paths],
            labels,
            names,
            digest_files(self.root, self.paths),
        )

    def image_file(self, i: int) -> Path:
        """Return the file of image `i`."""
        return self.root / self.paths[i]

    def image(self, i: int) -> Image.Image:
        """Decode image `i` to mode `L` or `RGB`; raise UnreadableImage."""
        path = self.root / self.paths[i]
        reason = ""
        try:
            if not is_inside(path, self.root):
                reason = "a symbolic link out of the data folder"
            elif path.is_dir() and not path.is_symlink():
                reason = "a folder that cannot be listed"
            elif not path.is_file():  # opening a pipe would block
                reason = "a broken link, a folder or a device, not a file"
        except OSError as error:
            reason = error.strerror
        if reason:
            raise UnreadableImage(self.ids[i], reason)
        return decode(path, self.ids[i])


def _printable(path: str) -> str:
    # A file name that is not UTF-8 must be printable and fit into a CSV.
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a path of `find_images`, with links resolved, is below `root`."""
    if not path.is_symlink():
        return True
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def find_images(root: Path) -> Iterator[str]:
    """Yield the image files below `root`, relative to it, without entering linked folders.

    A folder that cannot be listed is one entry (`.` if it is `root` itself).
    """
    closed: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=closed.append):
        folders[:] = [f for f in folders if not f.startswith(".")]
        # A linked folder is one entry, so that it is reported as left out.
        links = [f for f in folders if os.path.islink(os.path.join(folder, f))]
        for file in files + links:
            is_image = os.path.splitext(file)[1].lower() in EXTENSIONS and not file.startswith(".")
            if is_image or file in links:
                yield os.path.relpath(os.path.join(folder, file), root)
    for error in closed:
        yield os.path.relpath(error.filename, root)


def _is_file(path: Path, root: Path) -> bool:
    try:
        return is_inside(path, root) and path.is_file()
    except OSError:  # a folder that may be listed but not entered
        return False


def digest_array(array: np.ndarray, labels: np.ndarray | None = None) -> str:
    """Return the SHA-256 of shape, dtype, labels and every value."""
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    _log_if_large(array.nbytes)
    rows = max(1, BLOCK * len(array) // max(array.nbytes, 1))
    for start in range(0, len(array), rows):
        digest.update(np.ascontiguousarray(array[start : start + rows]).data)
        release_pages(array)
    if labels is not None:
        digest.update(np.ascontiguousarray(labels).data)
    return digest.hexdigest()


def digest_files(root: Path, paths: Sequence[str]) -> str:
    """Return the SHA-256 of names, sizes and all bytes, not of times: a copy is the same data."""
    digest = hashlib.sha256()
    total = 0
    for path in paths:
        file = root / path
        size = file.stat().st_size if _is_file(file, root) else -1
        digest.update(f"{size} ".encode() + os.fsencode(path) + b"\0")
        total += max(size, 0)
    _log_if_large(total)
    for path in paths:
        file = root / path
        try:
            if _is_file(file, root):
                with open(file, "rb", buffering=0) as content:
                    while block := content.read(BLOCK):
                        digest.update(block)
        except OSError as error:  # decoding reports it
            digest.update(type(error).__name__.encode())
    return digest.hexdigest()


def _log_if_large(size: int) -> None:
    if size > LARGE:
        logger.info("reading all %.1f GiB of the data for its fingerprint", size / 2**30)
