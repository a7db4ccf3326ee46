"""Protect patients, not images: 350 synthetic patients own four digits each; each patient is one unit."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import dpvision

digits, labels = load_digits(return_X_y=True)
inputs = torch.tensor(digits / 16 - 0.5, dtype=torch.float32).reshape(-1, 1, 8, 8)
private, test = (inputs[:1400], torch.tensor(labels[:1400])), slice(1400, None)
patients = [f"patient {row % 350}" for row in range(1400)]  # the owner of each training image


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


# How many patients there are is not declared: it is counted with noise, and the run in this folder pays for it.
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/patients"
counted = dpvision.count_units(private, folder, units=patients)
plan = {"num_units": counted, "expected_batch_size": 100, "steps": 60, "privacy_unit": "patient"}
mechanism = dpvision.Mechanism.calibrated(target_epsilon=4.0, delta=1e-4, clip_norm=1.0, **plan)

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(144, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.8)
run = dpvision.PrivateRun(model, optimizer, mechanism, folder)
for batch in run.batches(private, units=patients, rows_per_unit=4):  # 100 patients per step on average
    run.step(batch, loss_fn)

accuracy = (model(inputs[test]).argmax(1).numpy() == labels[test]).mean()
result = run.release({"accuracy": accuracy}, evaluated_on="the last 397 digits", data_name="digits of patients")
print(f"epsilon {result.certificate['epsilon']:.2f} for one {result.certificate['privacy_unit']}")
print(f"accuracy {accuracy:.1%}, verified: {dpvision.verify(run.folder).ok}")
