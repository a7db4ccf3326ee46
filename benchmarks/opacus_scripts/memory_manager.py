"""A large batch in parts by BatchMemoryManager: CIFAR-10, 2,500 images, batches of 500, 2 epochs, epsilon 8."""

import sys
import time

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from benchmarks.opacus_scripts.rows import finish, rows

torch.manual_seed(int(sys.argv[1]))
dataset, test_images, test_labels = rows("cifar10", 2_500)
loader = torch.utils.data.DataLoader(dataset, batch_size=500, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.Tanh(),
    nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
criterion = nn.CrossEntropyLoss()

privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, target_epsilon=8.0, target_delta=1e-5, epochs=2,
    max_grad_norm=1.0,
)  # fmt: skip
started = time.process_time(), time.perf_counter()
for _ in range(2):
    model.train()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=100, optimizer=optimizer) as safe_loader:
        for images, target in safe_loader:
            optimizer.zero_grad()
            loss = criterion(model(images), target)
            loss.backward()
            optimizer.step()
finish(model, test_images, test_labels, privacy_engine.get_epsilon(1e-5), started)
