"""Open data sets of images, texts, sounds or features by name or path."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from einops import rearrange

from ssl_kd.core.errors import DatasetUnavailable, DatasetUnreachable, InputError, printable
from ssl_kd.core.files import CorruptFileError, atomic_write_bytes, strict_json
from ssl_kd.core.images.levels import Levels
from ssl_kd.core.settings.early import DATASETS, FILE_LIST, dataset_path
from ssl_kd.core.settings.import_paths import check_installed
from ssl_kd.vision.data.features import FeatureDataset, open_part
from ssl_kd.vision.data.folders import FileFolder, find_files
from ssl_kd.vision.data.images import ArrayDataset, FolderDataset, ImageDataset, find_images
from ssl_kd.vision.data.labels import NO_LABELS
from ssl_kd.vision.data.media import PictureTable, Rows
from ssl_kd.vision.data.samples import NOUNS, SampleDataset
from ssl_kd.vision.data.shards import Part, holds_tables, named_split, shards_of, splits_in
from ssl_kd.vision.data.sounds import SOUNDS, SoundFolder
from ssl_kd.vision.data.tables import is_saved, one_line_errors, open_table
from ssl_kd.vision.data.usage import LeftOut, counted

Split = Literal["train", "test"]
LabelSource = Literal["auto", "folders", "none"]
_FOLDER_OF_SPLIT = {"train": ("train",), "test": ("test", "val", "validation", "valid")}
_SPLITS_OF_IMAGES = {
    "train": ("train", "training"),
    "test": ("test", "testing", "val", "validation", "valid", "dev"),
}
"""Names of the folders of images of a split, in any case; the first one that exists is used."""
_UNLABELED = ("unlabeled", "unlabelled")  # names of folders
"""Further names of folders that show that the folder `train` beside them is a split."""


class NoSuchSplit(DatasetUnavailable):
    """Raised if a data set exists, but does not have the requested split."""


def open_dataset(
    name: str,
    split: Split,
    *,
    root: str | os.PathLike[str] = "data",
    download: bool = False,
    class_names: tuple[str, ...] | None = None,
    whole: bool = False,
    labels: LabelSource = "auto",
    column: str | None = None,
    label_column: str | None = None,
    levels: Levels | None = None,
) -> SampleDataset | FeatureDataset:
    """Open one split of a data set of images, texts, sounds or features.

    Args:
        name: `digits`, `cifar10`, `cifar100`, `stl10`, `fashion_mnist`, `imagenet`, or the path of
            a folder of images or of sounds, a feature file (.npy, .npz, .pt, .safetensors,
            .parquet, .h5ad), a table (.parquet, .csv, .tsv, .jsonl), a folder of Parquet files, or
            a data set that Hugging Face's `save_to_disk` wrote. A folder may have the subfolders
            `train` and `test` (or `val`, `valid`, `validation`, `dev`); a folder `train` without
            one of these, or `unlabeled`, beside it is a folder like any other, unless it is the
            only one. The test split of a feature file `..._train.npz` is `..._test.npz` in the same
            folder. A table that has pictures, texts or sound files instead of features is a data
            set of these. Or a list of image files (.files) of `ssl_kd watch`.
        split: `train` or `test`.
        root: folder of the data sets that torchvision or image-net.org provide.
        download: whether to download a missing data set of torchvision.
        class_names: order of the classes, if the training split is in another folder or file.
        whole: whether a feature file, or a folder without split subfolders, is this split.
        labels: `folders` uses the subfolders of an image folder as classes; `auto` gives image
            folders no labels, and other data sets their own; with `none` there are no labels.
        column: array or list column of a feature file with the features, or column of pictures,
            texts or sound files.
        label_column: array or column of a feature file with the labels; None: by its name
            (`ssl_kd.vision.data.labels`).
        levels: values of black and white of images with more than 8 bits, as of another split; by
            default they suit the images of this one.

    Raises:
        NoSuchSplit: the data set exists, but not this split.
        DatasetUnavailable: the data set does not exist.
        InputError: the data cannot be read, or a column does not fit.
    """
    if split not in _FOLDER_OF_SPLIT:
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    dataset: SampleDataset | FeatureDataset | None
    path = None if name in NAMES else dataset_path(name)
    is_file = path is not None and path.suffix != FILE_LIST and _has_columns(path)
    for setting, value in (("column", column), ("label_column", label_column)):
        if value is not None and not is_file:
            raise InputError(
                f"{setting.upper()} is {value!r}, but {name} has no columns, only files: remove "
                f"--{setting}"
            )
    if labels == NO_LABELS and label_column is not None:
        raise InputError(
            f"LABELS is {labels!r}, but LABEL_COLUMN is {label_column!r}: remove one of them"
        )
    if path is None:
        dataset = NAMES[name](name, split, Path(root), download)
        if labels == NO_LABELS:
            dataset.labels = dataset.class_names = None
        return dataset
    if not is_file:
        dataset = _open_folder(path, name, split, class_names, whole, labels == "folders", levels)
    else:
        label_column = NO_LABELS if labels == NO_LABELS else label_column
        dataset = _open_table(path, split, class_names, column, label_column, whole)
        if isinstance(dataset, PictureTable) and levels is not None:
            dataset.rows.levels = levels
    if dataset is None:
        raise NoSuchSplit(f"the data set {name} has no {split} split")
    return dataset


def _has_columns(path: Path) -> bool:
    """Return whether a data set is a feature file or a table."""
    return path.is_file() or is_saved(path) or holds_tables(path)


def read_file_list(path: Path) -> dict[str, Any]:
    """Read a list of image files: a `folder`, and `files`, relative path -> size and mtime_ns."""
    try:
        listed = strict_json(path.read_bytes())
        if isinstance(listed["folder"], str) and isinstance(listed["files"], dict):
            return listed
    except (ValueError, KeyError, TypeError):
        pass
    raise CorruptFileError(
        f"{path} is not a list of image files that ssl_kd watch wrote: restore it"
    )


def _open_folder(
    path: Path,
    name: str,
    split: Split,
    class_names: tuple[str, ...] | None,
    whole: bool,
    labeled: bool,
    levels: Levels | None = None,
) -> FileFolder | None:
    kind = _kind_of_folder(path)
    splits = _split_folders(path, kind.suffixes)
    if "train" not in splits and not (whole and "test" in splits):
        splits = {"train": path} | ({"test": path} if whole else {})
    folder = splits.get(split)
    if folder is None:
        return None
    left_out = [] if folder == path or split == "test" else _beside_splits(path, splits, kind)
    paths = None
    if folder.is_file():
        listed = read_file_list(folder)
        folder = listed["folder"]
        name = listed["folder"]
        paths = listed["files"]
    try:
        if split == "test" and class_names is None and labeled:
            class_names = _class_folders(splits.get("train"), kind.suffixes)
        options: dict[str, Any] = {"labeled": labeled, "class_names": class_names}
        options |= {"paths": paths, "left_out": left_out}
        if kind is FolderDataset:
            options["levels"] = levels
        return kind(folder, name, split, **options)
    except FileNotFoundError as error:
        raise DatasetUnavailable(str(error)) from None


def _kind_of_folder(path: Path) -> type[FileFolder]:
    """Return the class of a folder's data set: of its images, or of its sounds if it has none."""
    is_of_sounds = (
        path.is_dir()
        and next(find_images(path), None) is None
        and next(find_files(path, SOUNDS), None) is not None
    )
    return SoundFolder if is_of_sounds else FolderDataset


def _split_folders(path: Path, suffixes: Collection[str]) -> dict[str, Path]:
    """Return the folders of the splits; empty if the folder holds one whole data set.

    A name alone does not make a split, since `train` may be a class: a split is beside another one,
    or it is all that the folder holds.
    """
    try:
        folders = {entry.name: entry for entry in sorted(path.iterdir()) if entry.is_dir()}
    except OSError:  # a list of files, or a folder that cannot be listed, which opening it reports
        return {}
    by_name = {name.lower(): entry for name, entry in folders.items()} | folders
    splits: dict[str, Path] = {}
    for split, names in _SPLITS_OF_IMAGES.items():
        places = (by_name[name] for name in names if name in by_name)
        if (place := next(places, None)) is not None:
            splits[split] = place
    has_siblings = "train" in splits and ("test" in splits or any(n in by_name for n in _UNLABELED))
    if splits and not has_siblings and _files_beside(path, splits, suffixes):
        return {}
    return splits


def _files_beside(
    path: Path, splits: Mapping[str, Path], suffixes: Collection[str]
) -> dict[str, int]:
    """Return folder -> number of files for what is beside the split folders; `` for loose ones."""
    numbers: Counter[str] = Counter()
    split_names = {folder.name for folder in splits.values()}
    for file in find_files(path, suffixes, skip=split_names):
        first, separator, _ = file.partition(os.sep)
        numbers[first if separator else ""] += 1
    return dict(numbers)


def _beside_splits(path: Path, splits: Mapping[str, Path], kind: type[FileFolder]) -> list[LeftOut]:
    """Describe the images or sounds of a folder that are in neither split."""
    noun = NOUNS[kind.kind]
    names = printable(" and ".join(f"{folder.name}/" for folder in splits.values()))
    held_out = _SPLITS_OF_IMAGES["test"]
    left_out = []
    for folder, n in sorted(_files_beside(path, splits, kind.suffixes).items()):
        what = printable(f"{counted(n, noun)} in {folder}/" if folder else counted(n, noun))
        reason = f"the splits are {names}"
        if folder:
            option = "dataset_test" if folder.lower() in held_out else "dataset"
            reason += f"; to use them: --{option} {printable(str(path / folder))}"
        left_out.append(LeftOut(what, reason))
    return left_out


def _class_folders(train: Path | None, suffixes: Collection[str]) -> tuple[str, ...] | None:
    # Classes are numbered as in the training split, since the test split may lack some.
    if train is None:
        return None
    folders = [f for f in train.iterdir() if f.is_dir() and not f.is_symlink()]
    shown = (folder for folder in folders if folder.name[0] != ".")
    names = sorted(f.name for f in shown if next(find_files(f, suffixes), ".") != ".")
    return tuple(names) or None


def open_rows(
    name: str,
    split: Split,
    *,
    whole: bool = False,
    column: str | None,
    media: str | None,
    label_column: str | None = None,
    labels: LabelSource = "auto",
) -> Rows | None:
    """Open the rows of one split of a table; None if the data set is not a table."""
    path = None if name in NAMES else dataset_path(name)
    if path is None or not _has_columns(path):
        return None
    part = _part(path, split, whole)
    if part is None:
        return None
    with one_line_errors(part.path):
        table = open_table(*part)
        if table is None:
            return None
        label_column = NO_LABELS if labels == NO_LABELS else label_column
        return Rows(table, column, media, label_column=label_column)


def _part(path: Path, split: Split, whole: bool = False) -> Part | None:
    """Return the files with one split of the features or the table in `path`."""
    splits = _FOLDER_OF_SPLIT[split]
    if path.is_file():
        if split == "train" or whole:
            return Part(path, shards_of(path))
        return named_split(path, splits)
    if is_saved(path):
        if not (path / "dataset_dict.json").is_file():
            return Part(path, ()) if split == "train" or whole else None
        places = (path / name for name in splits)
        return next((Part(place, ()) for place in places if is_saved(place)), None)
    parts = splits_in(path)
    names = (name for name in splits if name in parts)
    if len(parts) == 1 and (split == "train" or whole):
        names = iter(parts)
    name = next(names, None)
    return None if name is None else parts[name]


def _unused_splits(path: Path) -> list[LeftOut]:
    """Return the splits of a folder of tables that are neither the training nor the test split."""
    if path.is_file():
        return []
    names, listed = [], path / "dataset_dict.json"
    if listed.is_file():
        names = list(strict_json(listed.read_bytes())["splits"])
    elif not is_saved(path):
        names = list(splits_in(path))
    used = [next((n for n in splits if n in names), None) for splits in _FOLDER_OF_SPLIT.values()]
    reason = "a run reads one split to train on and one to test on"
    return [LeftOut(f"split {name} of {path}", reason) for name in names if name not in used]


def _open_table(
    path: Path,
    split: Split,
    class_names: tuple[str, ...] | None,
    column: str | None,
    label_column: str | None,
    whole: bool,
) -> FeatureDataset | SampleDataset | None:
    if (part := _part(path, split, whole)) is None:
        return None
    if split == "test" and not whole and class_names is None:
        train = open_part(_part(path, "train") or part, "train", None, column, label_column)
        class_names = train.class_names
    unused = _unused_splits(path) if split == "train" and not whole else []
    return open_part(part, split, class_names, column, label_column, unused)


def _digits(name: str, split: Split, root: Path, download: bool) -> ImageDataset:
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    # Values are 0 to 16; 15 scales them to eight bits.
    images = (data.images * 15).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    rows = np.sort(order[:1437] if split == "train" else order[1437:])
    names = tuple(str(n) for n in data.target_names)
    ids = [f"digits/{row}" for row in rows]
    return ArrayDataset(name, split, images[rows], data.target[rows], names, ids)


def _torchvision(name: str, split: Split, root: Path, download: bool) -> ImageDataset:
    check_installed(["torchvision"], "vision", f"DATASET {name!r}")
    from torchvision import datasets

    train = split == "train"
    folder, opener = {
        "cifar10": ("cifar-10-batches-py", lambda d: datasets.CIFAR10(root, train, download=d)),
        "cifar100": ("cifar-100-python", lambda d: datasets.CIFAR100(root, train, download=d)),
        "stl10": ("stl10_binary", lambda d: datasets.STL10(root, split, download=d)),
        "fashion_mnist": ("FashionMNIST", lambda d: datasets.FashionMNIST(root, train, download=d)),
    }[name]
    if name == "fashion_mnist":
        _unpack(root / folder / "raw")
    try:
        data: Any = opener(download)
    except (RuntimeError, OSError) as error:
        if download:
            reason = " ".join(str(error).split())
            raise DatasetUnreachable(
                f"{name} could not be downloaded: {reason}. Check the network, or copy the files "
                f"of torchvision to {root / folder}"
            ) from error
        raise DatasetUnavailable(
            f"{name} is missing or damaged in {root / folder}: use --download, or copy the files "
            "of torchvision there"
        ) from error
    arrays = np.asarray(data.data)
    if name == "stl10":
        arrays = rearrange(arrays, "image channel height width -> image height width channel")
    labels = np.asarray(getattr(data, "targets", getattr(data, "labels", None)))
    return ArrayDataset(name, split, arrays, labels, tuple(data.classes))


def _unpack(folder: Path) -> None:
    # torchvision unpacks only files that it has downloaded itself.
    for packed in folder.glob("*.gz"):
        if not packed.with_suffix("").exists():
            with gzip.open(packed) as source:
                atomic_write_bytes(packed.with_suffix(""), source.read())


def _imagenet(name: str, split: Split, root: Path, download: bool) -> SampleDataset:
    folder = root / "imagenet"
    dataset = _open_folder(folder, name, split, None, False, True) if folder.is_dir() else None
    if dataset is None or not (folder / "train").is_dir():
        raise DatasetUnavailable(
            f"imagenet is missing in {folder}: download ILSVRC2012 with an account of "
            "image-net.org, and unpack it there to train/<class>/ and val/<class>/"
        )
    return dataset


NAMES: dict[str, Callable[[str, Split, Path, bool], SampleDataset]] = {
    **dict.fromkeys(DATASETS, _torchvision),
    "digits": _digits,
    "imagenet": _imagenet,
}
"""Function that opens a data set, by name."""
