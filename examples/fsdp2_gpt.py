"""A small GPT, sharded by FSDP2 within each replica; the replicas train over gossip.

    gossipdp run -n 4 --nproc-per-replica 2 examples/fsdp2_gpt.py     a death ends one replica
    torchrun --nproc-per-node 4 examples/fsdp2_gpt.py --shards 2      a death ends the run

It learns to continue the bytes of Python's own standard library.
"""

import argparse
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gossipdp import GossipDataParallel, ProgressLR

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--shards", type=int, help="per replica; default: all processes of a world")
arguments.add_argument("--samples", type=int, default=8_000)
arguments.add_argument("--layers", type=int, default=2)
arguments.add_argument("--width", type=int, default=64)
options = arguments.parse_args()
LENGTH, BATCH = 64, 8


class Block(nn.Module):
    """Attention to the bytes before, and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same."""
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=2)
        heads = [part.unflatten(2, (4, -1)).transpose(1, 2) for part in parts]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Bytes in, logits of the next bytes out."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Map (batch, length) to (batch * length, 256)."""
        x = self.embed(text) + self.place(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


dist.init_process_group("gloo")
shards = options.shards or dist.get_world_size()
dims = (dist.get_world_size() // shards, shards)
mesh = init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard"))
net = GPT(options.layers, options.width)
for block in net.blocks:
    fully_shard(block, mesh=mesh["shard"])
fully_shard(net, mesh=mesh["shard"])
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
replicas = mesh["replicate"]
model = GossipDataParallel(net, optimizer, mesh=replicas, budget_samples=options.samples)
schedule = ProgressLR(optimizer, model, "cosine")

source = Path(statistics.__file__).read_bytes()
text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
chosen = torch.Generator().manual_seed(model.worker_seed)  # differs between all processes
starts = torch.randint(len(text) - LENGTH - 1, (1000, BATCH), generator=chosen)
loader = [torch.stack([text[i : i + LENGTH + 1] for i in row]) for row in starts]

for batch in model.batches(loader):
    loss = F.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()

end = model.consolidate()
if mesh.get_local_rank("shard") == 0:
    print(f"replica {model.rank}: loss {loss.item():.2f}, average of {end.world_size} replicas")
dist.destroy_process_group()
