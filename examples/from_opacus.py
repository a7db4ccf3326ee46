"""A script written for Opacus: its import is another one, its loop is the same, and a certificate is added."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpvision.compat  # instead of opacus

images, labels = load_digits(return_X_y=True)
inputs = torch.tensor(images / 16 - 0.5, dtype=torch.float32).reshape(-1, 1, 8, 8)
targets = torch.tensor(labels)
train_loader = DataLoader(TensorDataset(inputs[:1400], targets[:1400]), batch_size=200, shuffle=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(144, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.8)
criterion = nn.CrossEntropyLoss()
privacy_engine = dpvision.compat.PrivacyEngine(folder=sys.argv[1] if len(sys.argv) > 1 else "runs/from-opacus")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=train_loader,
    target_epsilon=3.0, target_delta=1e-4, epochs=8, max_grad_norm=1.0,
)  # fmt: skip
for _ in range(8):
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
print(f"epsilon {privacy_engine.get_epsilon(1e-4):.3f}")

model.eval()
accuracy = (model(inputs[1400:]).argmax(1) == targets[1400:]).float().mean().item()
result = privacy_engine.release({"accuracy": accuracy}, evaluated_on="the last 397 digits", data_name="digits")
print(f"accuracy {accuracy:.1%}, verified: {dpvision.verify(result.run).ok}")
