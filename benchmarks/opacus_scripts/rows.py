"""The first rows of a public dataset as tensors, normalised, and its test images; the output of a script."""

from __future__ import annotations

import json
import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpvision.data import load


def rows(name: str, count: int) -> tuple[TensorDataset, Tensor, Tensor]:
    """Return the first ``count`` training rows as a dataset, and all test images and labels."""
    splits = load(name)
    parts = []
    for store in (splits.train, splits.test):
        images = torch.as_tensor(store.images, dtype=torch.float32) / 255 - 0.5
        parts.append((4 * images, torch.as_tensor(store.labels).long()))
    (images, labels), (test_images, test_labels) = parts
    return TensorDataset(images[:count], labels[:count]), test_images, test_labels


def finish(model: nn.Module, images: Tensor, labels: Tensor, epsilon: float, started: tuple[float, float]) -> None:
    """Print accuracy, epsilon and the time of the loop as one line of JSON."""
    cpu, wall = time.process_time() - started[0], time.perf_counter() - started[1]
    model.eval()
    with torch.no_grad():
        correct = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(500), labels.split(500), strict=True)
        )
    found = {"epsilon": epsilon, "accuracy": correct / len(labels), "cpu_seconds": cpu, "seconds": wall}
    print(json.dumps({**found, "key": next(iter(model.state_dict()))}))
