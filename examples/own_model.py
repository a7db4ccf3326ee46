"""Your own model and loss in ``dpvision.train``; the certificate names the file, the functions and the file's hash.

As a command: dpvision train digits --model examples/own_model.py:make --loss examples/own_model.py:smooth
"""

import sys

from torch import Tensor, nn

import dpvision


def make(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    layers = [nn.Conv2d(in_channels, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16 * (image_size // 2) ** 2, num_classes))


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    """One value per row."""
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1, reduction="none")


if __name__ == "__main__":
    config = dpvision.RunConfig(
        data={"source": "digits"},
        privacy={"target_epsilon": 3.0, "delta": 1e-4, "expected_batch_size": 256, "steps": 60, "clip_norm": 1.0},
        optimizer={"name": "sgd", "learning_rate": 2.0, "momentum": 0.8},
    )
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/own-model"
    result = dpvision.train(config, run=folder, model=make, loss=smooth)
    print(*(each["how"] for each in result.certificate["declared"] if each["what"].startswith("own")), sep="\n")

    released = dpvision.load(result.run, model=make)  # the code is named again, and its hash is compared
    print(sum(p.numel() for p in released.model.parameters()), "released parameters")
    print(f"accuracy {result.metrics['final']['accuracy']:.1%}, verified: {dpvision.verify(result.run).ok}")
