"""The loop of plain_ddp.py under gossipdp.

    gossipdp run -n 4 examples/plain_gossipdp.py
    torchrun --nproc-per-node 4 examples/plain_gossipdp.py

Three lines differ: an import, the wrapping, and consolidate().
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from gossipdp import Exchange, GossipDataParallel

dist.init_process_group("gloo")

digits = load_digits()
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
labels = torch.tensor(digits.target)[order]
train = TensorDataset(images[:1437], labels[:1437])

torch.manual_seed(dist.get_rank())
net = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, stride=2),
    nn.Flatten(),
    nn.Linear(32 * 3 * 3, 10),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
model = GossipDataParallel(net, optimizer, exchange=Exchange(pace="strict"))

sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
model.consolidate()

net.eval()
accuracy = (net(images[1437:]).argmax(dim=1) == labels[1437:]).float().mean().item()
print(f"worker {dist.get_rank()}: accuracy {accuracy:.4f}")
