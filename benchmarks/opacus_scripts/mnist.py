"""MNIST in the manner of Opacus's example: 10,000 images, 3 epochs, epsilon 3."""

import sys
import time

import torch
from opacus import PrivacyEngine
from torch import nn

from benchmarks.opacus_scripts.rows import finish, rows

torch.manual_seed(int(sys.argv[1]))
dataset, test_images, test_labels = rows("mnist", 10_000)
loader = torch.utils.data.DataLoader(dataset, batch_size=250, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
    nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
    nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
criterion = nn.CrossEntropyLoss()

privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, target_epsilon=3.0, target_delta=1e-5, epochs=3,
    max_grad_norm=1.0,
)  # fmt: skip
started = time.process_time(), time.perf_counter()
for _ in range(3):
    model.train()
    losses = []
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
finish(model, test_images, test_labels, privacy_engine.get_epsilon(1e-5), started)
