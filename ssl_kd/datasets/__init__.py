"""Data sets by name: images and ready-made features, one call for all."""

from ssl_kd.datasets.decode import UnreadableImage, decode
from ssl_kd.datasets.features import FeatureDataset, open_features
from ssl_kd.datasets.images import ArrayDataset, FolderDataset, ImageDataset
from ssl_kd.datasets.named import DatasetUnavailable, open_dataset

__all__ = [
    "ArrayDataset",
    "DatasetUnavailable",
    "FeatureDataset",
    "FolderDataset",
    "ImageDataset",
    "UnreadableImage",
    "decode",
    "open_dataset",
    "open_features",
]
