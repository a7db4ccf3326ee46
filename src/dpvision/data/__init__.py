"""Datasets: readers of every supported source, one uint8 store in memory, privacy units, augmentation and features.

``load`` reads a source into an ``ImageStore``, which knows the privacy unit of each row; ``ImageBatches`` samples from
it. Files are untrusted: all readers go through ``safe_read``.
"""

from dpvision.config import ViewsConfig
from dpvision.data.augmentation import erase_views, make_views, words_per_view
from dpvision.data.batches import DrawnBatch, ImageBatches, hold_out
from dpvision.data.datasets import DATASETS, cache_folder, dataset_names
from dpvision.data.features import FeatureDraws, Features, extract, kept_features
from dpvision.data.images import load_images
from dpvision.data.loading import Splits, load, load_one
from dpvision.data.nifti import read_volume, volume_images
from dpvision.data.normalisation import Normalisation, fixed_normalisation, released_normalisation
from dpvision.data.options import LoadOptions
from dpvision.data.safe_read import read_member
from dpvision.data.store import ImageStore, dense_units, store_of_arrays

__all__ = [
    "DATASETS",
    "DrawnBatch",
    "FeatureDraws",
    "Features",
    "ImageBatches",
    "ImageStore",
    "LoadOptions",
    "Normalisation",
    "Splits",
    "ViewsConfig",
    "cache_folder",
    "dataset_names",
    "dense_units",
    "erase_views",
    "extract",
    "fixed_normalisation",
    "hold_out",
    "kept_features",
    "load",
    "load_images",
    "load_one",
    "make_views",
    "read_member",
    "read_volume",
    "released_normalisation",
    "store_of_arrays",
    "volume_images",
    "words_per_view",
]
