"""Open data sets of images, texts, sounds or features by name or path."""

from ssl_kd.core.errors import DatasetUnavailable, DatasetUnreachable, UnreadableSample
from ssl_kd.core.images.decode import UnreadableImage, decode
from ssl_kd.vision.data.catalog import NoSuchSplit, open_dataset
from ssl_kd.vision.data.features import FeatureDataset, open_features
from ssl_kd.vision.data.folders import FileFolder
from ssl_kd.vision.data.images import ArrayDataset, FolderDataset, ImageDataset
from ssl_kd.vision.data.samples import SampleDataset

__all__ = [
    "ArrayDataset",
    "DatasetUnavailable",
    "DatasetUnreachable",
    "FeatureDataset",
    "FileFolder",
    "FolderDataset",
    "ImageDataset",
    "NoSuchSplit",
    "SampleDataset",
    "UnreadableImage",
    "UnreadableSample",
    "decode",
    "open_dataset",
    "open_features",
]
