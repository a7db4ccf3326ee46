"""Load released models, predict with them, and measure models on public images.

Guarantee: none. A metric describes the images that went in, exactly and without noise: only public test data may be
used for metrics that are released.
"""

from dpvision.inference.mask_metrics import MaskMetrics, dice_of_images, evaluate_masks
from dpvision.inference.metrics import FindingMetrics, Metrics, evaluate, evaluate_features, metrics_of
from dpvision.inference.predict import Predictions, predict_masks, predict_probabilities

__all__ = [
    "FindingMetrics",
    "MaskMetrics",
    "Metrics",
    "Predictions",
    "dice_of_images",
    "evaluate",
    "evaluate_features",
    "evaluate_masks",
    "metrics_of",
    "predict_masks",
    "predict_probabilities",
]
