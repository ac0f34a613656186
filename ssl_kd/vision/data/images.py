"""Define data sets of images, from folders of files or from arrays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from ssl_kd.core.images.decode import UnreadableImage, decode, find_levels
from ssl_kd.core.images.formats import DEEP, EXTENSIONS, suffix_of, way_to_read
from ssl_kd.core.images.levels import Levels
from ssl_kd.vision.data.digests import digest_array, is_file
from ssl_kd.vision.data.folders import FileFolder, file_id, find_files, why_not_read
from ssl_kd.vision.data.samples import SampleDataset


@dataclass(eq=False)
class ImageDataset(SampleDataset):
    """A data set of images with names and, if known, classes."""

    arrays: np.ndarray | None = None  # uint8 [n, h, w] or [n, h, w, 3]; None for image files

    kind: ClassVar[str] = "image"

    @property
    def levels(self) -> Levels:
        """The values of black and white, for images of more than 8 bits."""
        return Levels()

    def image_file(self, i: int) -> Path | None:
        """Return the file of image `i`, or None if the images are not separate files."""
        return self.file(i)

    def image(self, i: int) -> Image.Image:
        """Decode image `i` to mode `L` or `RGB`; raise UnreadableImage."""
        raise NotImplementedError

    def sample(self, i: int) -> Image.Image:
        """Decode image `i`, as `image` does."""
        return self.image(i)


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
        digest = digest_array(arrays, labels)
        super().__init__(name, split, ids, labels, class_names, digest)
        self.arrays = np.ascontiguousarray(arrays)

    def image(self, i: int) -> Image.Image:
        """Return image `i` in mode `L` or `RGB`."""
        assert self.arrays is not None
        return Image.fromarray(self.arrays[i])


class FolderDataset(FileFolder, ImageDataset):
    """A data set of the image files in a folder and its subfolders, or of those in `paths`.

    `levels` are the values of black and white of images with more than 8 bits. By default they
    suit all images of the folder; the fingerprint depends on them. The other arguments are those
    of `FileFolder`.
    """

    suffixes = EXTENSIONS
    way_to_read = staticmethod(way_to_read)

    def __init__(
        self,
        root: str | os.PathLike[str],
        name: str,
        split: str,
        *,
        levels: Levels | None = None,
        **options: Any,
    ) -> None:
        self._levels = levels
        super().__init__(root, name, split, **options)

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """SHA-256 of the names, sizes and contents of the files, and of unusual `levels`."""
        return with_levels(self.digest, self.levels)

    @cached_property
    def levels(self) -> Levels:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values of black and white, for images of more than 8 bits."""
        if self._levels is not None:
            return self._levels
        files = (self.root / path for path in self.paths if suffix_of(path) in DEEP)
        regular = (file for file in files if is_file(file, self.root, self.follows_links))
        return find_levels(regular)

    @property
    def used(self) -> str:
        """What of the folder is used, with the levels of its images."""
        return "; ".join(filter(None, [super().used, str(self.levels)]))

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
    path = root / relative
    if reason := why_not_read(path, root, follow_links=follow_links):
        raise UnreadableImage(file_id(relative), reason)
    return decode(path, file_id(relative), levels)


def find_images(root: Path, skip: Collection[str] = ()) -> Iterator[str]:
    """Yield the paths of all image files in `root` and its subfolders, relative to `root`.

    `skip` has the names of subfolders of `root` that are not entered.

    Symbolic links to folders are not entered. They, and folders that cannot be listed, are yielded
    as entries, so that reading them reports why they are left out; `.` stands for `root` itself.
    """
    return find_files(root, EXTENSIONS, skip)


def with_levels(digest: str, levels: Levels) -> str:
    """Return the digest of images whose values of more than 8 bits are seen with some levels."""
    if levels == Levels():
        return digest
    return hashlib.sha256(f"{digest} {levels}".encode()).hexdigest()
