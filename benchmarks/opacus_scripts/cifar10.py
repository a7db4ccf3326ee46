"""CIFAR-10 in the manner of Opacus's example: 2,000 images, 2 epochs, epsilon 8, training accuracy in the loop."""

import sys
import time

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn

from benchmarks.opacus_scripts.rows import finish, rows

torch.manual_seed(int(sys.argv[1]))
dataset, test_images, test_labels = rows("cifar10", 2_000)
loader = torch.utils.data.DataLoader(dataset, batch_size=200, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AvgPool2d(2),
    nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
model = ModuleValidator.fix(model)
optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss()

privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, target_epsilon=8.0, target_delta=1e-5, epochs=2,
    max_grad_norm=1.0,
)  # fmt: skip
started = time.process_time(), time.perf_counter()
for _ in range(2):
    model.train()
    losses, accuracies = [], []
    for images, target in loader:
        optimizer.zero_grad()
        output = model(images)
        loss = criterion(output, target)
        predictions = np.argmax(output.detach().cpu().numpy(), axis=1)
        accuracies.append((predictions == target.detach().cpu().numpy()).mean())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
finish(model, test_images, test_labels, privacy_engine.get_epsilon(1e-5), started)
