"""Open data sets of images or features by name or path."""

from ssl_kd.core.errors import DatasetUnavailable, DatasetUnreachable
from ssl_kd.core.images.decode import UnreadableImage, decode
from ssl_kd.vision.data.catalog import NoSuchSplit, open_dataset
from ssl_kd.vision.data.features import FeatureDataset, open_features
from ssl_kd.vision.data.images import ArrayDataset, FolderDataset, ImageDataset

__all__ = [
    "ArrayDataset",
    "DatasetUnavailable",
    "DatasetUnreachable",
    "FeatureDataset",
    "FolderDataset",
    "ImageDataset",
    "NoSuchSplit",
    "UnreadableImage",
    "decode",
    "open_dataset",
    "open_features",
]
