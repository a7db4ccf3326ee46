"""Models of other packages train privately: MONAI's U-Net and a vision transformer of Hugging Face, random weights.

Skipped where these packages are not installed; nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpvision
from model_cases import Case, Own
from separability_oracle import Trial, Verdict, judge

# What these packages warn about is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = 12


def monai_unet(**settings: Any) -> nn.Module:
    """Build MONAI's U-Net for two classes. Its default normalisation, instance norm, treats each image by itself."""
    nets = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed", exc_type=ImportError)
    return nets.UNet(
        spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 8), strides=(2, 2), num_res_units=1, **settings
    )


def hugging_face_vit(**settings: Any) -> nn.Module:
    """Build a vision transformer for three classes by a configuration made by hand."""
    library = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
    values = {
        "image_size": 16, "patch_size": 8, "num_channels": 3, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3,
    }  # fmt: skip
    return library.ViTForImageClassification(library.ViTConfig(**{**values, **settings})).train()


def masks(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(number, 1, 16, 16, generator=generator)
    return images, torch.randint(2, (number, 16, 16), generator=generator)


def loss_of_pixels(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none").mean((1, 2))


def classes(number: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    images = torch.randn(number, 3, 16, 16, generator=generator)
    return {"pixel_values": images}, torch.randint(2, (number,), generator=generator)


def loss_of_output_class(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets, reduction="none")


UNET = Case("MONAI's U-Net", "transposed convolutions, instance norm, PReLU",
            lambda: Own(monai_unet(), loss_of_pixels, masks))  # fmt: skip
VIT = Case("Hugging Face's ViT", "a dict as input and a class of its own as output",
           lambda: Own(hugging_face_vit(), loss_of_output_class, classes))  # fmt: skip
DROPPING_VIT = Case("Hugging Face's ViT with dropout", "dropout in attention and after it",
                    lambda: Own(hugging_face_vit(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2),
                                loss_of_output_class, classes), random=True)  # fmt: skip


@pytest.mark.parametrize("case", [UNET, VIT], ids=lambda case: case.name)
def test_a_model_of_another_package_takes_two_private_steps(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = case.make()
    rows, targets = own.rows(ROWS, torch.Generator().manual_seed(0))
    before = [parameter.detach().clone() for parameter in own.model.parameters()]
    mechanism = dpvision.Mechanism.calibrated(
        target_epsilon=3.0, delta=1e-3, num_units=ROWS, expected_batch_size=6, steps=2, clip_norm=0.5
    )
    optimizer = torch.optim.Adam(own.model.parameters(), lr=1e-2)
    run = dpvision.PrivateRun(own.model, optimizer, mechanism, tmp_path / "run")
    for batch in run.batches((rows, targets)):
        run.step(batch, own.loss_fn)
    assert all(not torch.equal(a, b) for a, b in zip(before, own.model.parameters(), strict=True))
    assert 2.5 < run.epsilon_spent <= 3.0
    run.release()
    assert dpvision.verify(tmp_path / "run").ok


@pytest.mark.parametrize("case", [UNET, VIT, DROPPING_VIT], ids=lambda case: case.name)
def test_the_sum_of_a_model_of_another_package_is_exact(case: Case) -> None:
    assert judge(case, Trial(rows=5)) == Verdict()


def test_a_unet_with_batch_norm_is_refused_by_name() -> None:
    model = monai_unet(norm="batch")
    inputs, targets = masks(4, torch.Generator().manual_seed(0))
    with pytest.raises(dpvision.errors.PrivacyError, match="BatchNorm"):
        dpvision.clipped_sum(model, loss_of_pixels, inputs, targets, clip_norm=1.0)
