"""Sources of images, one uint8 store, privacy units, and Poisson draws over them."""

from dpvision.data.augmentation import ViewSettings, erase_views, make_views
from dpvision.data.batches import ImageBatch, ImageBatches, hold_out
from dpvision.data.datasets import KNOWN, KnownSet, cache_folder
from dpvision.data.features import FeatureBatch, FeatureDraws, Features, extract, kept_features
from dpvision.data.images import load_images
from dpvision.data.loading import inspect, known_sources, load, load_one
from dpvision.data.nifti import Volume, is_volume, read_volume, volume_images
from dpvision.data.normalisation import Normalisation, fixed_normalisation
from dpvision.data.npz import read_member
from dpvision.data.options import LoadOptions, Progress
from dpvision.data.pixel_statistics import released_normalisation
from dpvision.data.store import ImageStore, Splits, UnitRows, dense_units, store_of_arrays

__all__ = [
    "KNOWN",
    "FeatureBatch",
    "FeatureDraws",
    "Features",
    "ImageBatch",
    "ImageBatches",
    "ImageStore",
    "KnownSet",
    "LoadOptions",
    "Normalisation",
    "Progress",
    "Splits",
    "UnitRows",
    "ViewSettings",
    "Volume",
    "cache_folder",
    "dense_units",
    "erase_views",
    "extract",
    "fixed_normalisation",
    "hold_out",
    "inspect",
    "is_volume",
    "kept_features",
    "known_sources",
    "load",
    "load_images",
    "load_one",
    "make_views",
    "read_member",
    "read_volume",
    "released_normalisation",
    "store_of_arrays",
    "volume_images",
]
