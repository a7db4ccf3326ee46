"""Models of the catalogue as if they were released, with weights that were never trained."""

from __future__ import annotations

from typing import Any

import torch

from dpvision import models
from dpvision.config import parse_config
from dpvision.data import fixed_normalisation
from dpvision.inference.load import ReleasedModel
from dpvision.models.losses import outputs_for


def released_model(name: str, *, side: int | None = None, findings: bool = False, **options: Any) -> ReleasedModel:
    """A model for images of ``side`` pixels, by default those of its paper; what starts at zero gets random numbers."""
    entry = models.entry(name)
    side = side or entry.image_size
    task = "segmentation" if entry.family == "segmentation" else "classification"
    classes = 2 if task == "segmentation" else entry.num_classes
    if "image_size" in entry.options:
        options = {"image_size": side, **options}
    outputs = outputs_for(task, classes)
    network = models.create(name, num_classes=outputs, in_channels=entry.in_channels, seed=0, **options).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return ReleasedModel(
        model=network,
        config=parse_config(
            {
                "task": task,
                "data": {"source": "scans", **({"findings": "findings.csv"} if findings else {})},
                "privacy": {"noise_multiplier": 1.0},
                "model": {"name": name, "options": options},
            }
        ),
        normalisation=fixed_normalisation(entry.in_channels, mean=0.4, std=0.3),
        class_names=tuple(f"class {number}" for number in range(classes)),
        image_shape=(entry.in_channels, side, side),
        certificate={},
    )
