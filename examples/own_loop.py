"""Your own training loop, made private: digits of scikit-learn, any torch optimizer, a certificate that verifies."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import dpvision

images, labels = load_digits(return_X_y=True)
inputs = torch.tensor(images / 16 - 0.5, dtype=torch.float32).reshape(-1, 1, 8, 8)
targets = torch.tensor(labels)
train, test = slice(0, 1400), slice(1400, None)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")  # one value per row


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(144, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.8)
mechanism = dpvision.Mechanism.calibrated(
    target_epsilon=3.0, delta=1e-4, num_units=1400, expected_batch_size=256, steps=60, clip_norm=1.0
)
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/own-loop"
run = dpvision.PrivateRun(model, optimizer, mechanism, folder)
for batch in run.batches((inputs[train], targets[train])):
    run.step(batch, loss_fn)
print(run.guarantee())

accuracy = (model(inputs[test]).argmax(1) == targets[test]).float().mean().item()
run.release({"accuracy": accuracy}, evaluated_on="the last 397 digits", data_name="digits")
print(f"accuracy {accuracy:.1%}, verified: {dpvision.verify(run.folder).ok}")
