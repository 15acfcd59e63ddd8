"""Handwritten digits in a loop under Hugging Face Accelerate.

    gossipdp run -n 4 examples/accelerate_loop.py
    torchrun --nproc-per-node 4 examples/accelerate_loop.py

Each worker goes through all the data, in an order of its own.
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gossipdp import Exchange
from gossipdp.integrations import single_process
from gossipdp.integrations.accelerate import gossip_data_parallel

with single_process() as worker:
    accelerator = Accelerator(cpu=True)

digits = load_digits()
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
labels = torch.tensor(digits.target)[order]
train = TensorDataset(images[:1437], labels[:1437])

torch.manual_seed(worker.seed)
net = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, stride=2),
    nn.Flatten(),
    nn.Linear(32 * 3 * 3, 10),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(train, batch_size=32, shuffle=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
model = gossip_data_parallel(
    accelerator, net, optimizer, budget_samples=20 * 1437, exchange=Exchange(pace="strict")
)

for inputs, targets in model.batches(loader):
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
    optimizer.step()
model.consolidate()

net.eval()
accuracy = (net(images[1437:]).argmax(dim=1) == labels[1437:]).float().mean().item()
print(f"worker {model.rank}: accuracy {accuracy:.4f}")
