"""A small transformer with tied embeddings learns to reverse digits, on any number of workers.

    gossipdp run -n 4 examples/tied_transformer.py
    torchrun --nproc-per-node 4 examples/tied_transformer.py

Each worker seeds its model differently; the wrapper makes all start from rank 0's.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossipdp import GossipDataParallel

LENGTH, WIDTH, VOCABULARY = 8, 64, 10


class Reverser(nn.Module):
    """Embedding, one encoder block, and the embedding again as the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, digits: Tensor) -> Tensor:
        """Map digits of shape (batch, LENGTH) to logits (batch, LENGTH, VOCABULARY)."""
        return self.out(self.block(self.embed(digits) + self.place))


torch.manual_seed(1234 + int(os.environ.get("RANK", "0")))
net = Reverser()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
model = GossipDataParallel(net, optimizer, graph="ring", budget_samples=16_000)
data = torch.Generator().manual_seed(model.worker_seed)
loader = [torch.randint(VOCABULARY, (32, LENGTH), generator=data) for _ in range(200)]

for digits in model.batches(loader):
    loss = F.cross_entropy(model(digits).transpose(1, 2), digits.flip(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

result = model.consolidate()
bits = b"".join(value.detach().numpy().tobytes() for value in net.parameters())
line = f"{hashlib.sha256(bits).hexdigest()} loss {loss.item():.3f} of {result.world_size} workers"
print(f"worker {model.rank}: {line}")
if len(sys.argv) > 1:
    Path(sys.argv[1], f"worker-{model.rank}.txt").write_text(line)
