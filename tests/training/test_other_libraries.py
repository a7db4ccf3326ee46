"""Models of other libraries train privately through ``PrivateRun`` as they are; skipped where one is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpvision

IMAGES = torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(24) % 3


def private_run(model: nn.Module, folder: Path, *, learning_rate: float = 0.01) -> dpvision.PrivateRun:
    mechanism = dpvision.Mechanism.calibrated(
        target_epsilon=8.0, delta=1e-3, num_units=24, expected_batch_size=8, steps=3, clip_norm=1.0
    )
    return dpvision.PrivateRun(model, torch.optim.AdamW(model.parameters(), lr=learning_rate), mechanism, folder)


def released(run: dpvision.PrivateRun, rows: Any, loss_fn: Any, **options: Any) -> None:
    before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    for batch in run.batches(rows, **options):
        run.step(batch, loss_fn)
    moved = [name for name, value in run.model.named_parameters() if not torch.equal(before[name], value)]
    assert len(moved) == len(before)
    run.release()
    assert dpvision.verify(run.folder).problems == ()


def test_a_vision_transformer_of_hugging_face_is_called_by_keyword(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=3,
    )
    torch.manual_seed(0)
    run = private_run(transformers.ViTForImageClassification(config), tmp_path / "run")
    items = [{"image": image, "label": int(label)} for image, label in zip(IMAGES, LABELS, strict=True)]

    def row(item: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
        return {"pixel_values": item["image"]}, item["label"]

    def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, targets, reduction="none")

    released(run, items, loss_fn, transform=row)


def test_the_unet_of_monai_draws_masks(tmp_path: Path) -> None:
    networks = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    model = networks.UNet(
        spatial_dims=2,
        in_channels=3,
        out_channels=1,
        channels=(4, 8, 8),
        strides=(2, 2),
        num_res_units=1,
        norm="INSTANCE",
    )
    masks = (IMAGES.mean(1, keepdim=True) > 0.5).float()

    def dice(outputs: Tensor, targets: Tensor) -> Tensor:
        """One value per image, not over the batch."""
        shares = outputs.sigmoid().flatten(1)
        wanted = targets.flatten(1)
        return 1 - (2 * (shares * wanted).sum(1) + 1) / (shares.sum(1) + wanted.sum(1) + 1)

    released(private_run(model, tmp_path / "run"), (IMAGES, masks), dice)
