"""Open data sets by name or path: images and features (`open_dataset`), or text (`open_text`)."""

from ssl_kd.datasets.catalog import (
    DatasetUnavailable,
    DatasetUnreachable,
    NoSuchSplit,
    open_dataset,
)
from ssl_kd.datasets.decode import UnreadableImage, decode
from ssl_kd.datasets.features import FeatureDataset, open_features
from ssl_kd.datasets.images import ArrayDataset, FolderDataset, ImageDataset
from ssl_kd.datasets.records import Example
from ssl_kd.datasets.text import TextDataset, open_text

__all__ = [
    "ArrayDataset",
    "DatasetUnavailable",
    "DatasetUnreachable",
    "Example",
    "FeatureDataset",
    "FolderDataset",
    "ImageDataset",
    "NoSuchSplit",
    "TextDataset",
    "UnreadableImage",
    "decode",
    "open_dataset",
    "open_features",
    "open_text",
]
