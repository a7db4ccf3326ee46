"""One private run in several processes: torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed.py"""

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import dpvision

images, labels = load_digits(return_X_y=True)  # every process has all rows; the draw decides who computes which
inputs = torch.tensor(images / 16 - 0.5, dtype=torch.float32).reshape(-1, 1, 8, 8)
targets = torch.tensor(labels)
train, test = slice(0, 1400), slice(1400, None)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")  # one value per row


model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(144, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.8)
mechanism = dpvision.Mechanism.calibrated(
    target_epsilon=3.0, delta=1e-4, num_units=1400, expected_batch_size=256, steps=60, clip_norm=1.0
)
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/distributed"
# After a restart the run continues from its last checkpoint; what was charged since then is charged again.
run = dpvision.PrivateRun.resume(folder, model, optimizer, or_start=mechanism)
for batch in run.batches((inputs[train], targets[train])):
    run.step(batch, loss_fn, microbatch_size=16)  # the micro-batches of a step are shared among the processes

accuracy = (model(inputs[test]).argmax(1) == targets[test]).float().mean().item()  # all have the same weights
run.release({"accuracy": accuracy}, evaluated_on="the last 397 digits", data_name="digits")
if os.environ.get("RANK", "0") == "0":
    print(run.guarantee())
    print(f"accuracy {accuracy:.1%}, verified: {dpvision.verify(run.folder).ok}")
