"""A small GPT on the bytes of any folder of text, as an open loop.

    gossipdp run -n 4 examples/bytes_gpt.py --data docs
    torchrun --nproc-per-node 4 examples/bytes_gpt.py

``gossipdp train bytes-gpt --workers 4 --data docs`` does the same.
"""

import torch
import tyro
from torch.optim.lr_scheduler import LambdaLR

from gossipdp import GossipDataParallel, parameter_groups
from gossipdp.recipes.batches import whole_batches
from gossipdp.recipes.bytes_gpt import bits_per_byte, next_byte_loss, read_windows
from gossipdp.recipes.options import BytesGptOptions
from gossipdp.recipes.recipe import worker_device
from gossipdp.recipes.training import TrainingRun
from gossipdp.workloads import learning_rate_factor
from gossipdp.workloads.byte_transformer import ByteTransformer

options = tyro.cli(BytesGptOptions)
torch.manual_seed(options.seed)
device = worker_device(options.device)
train, validation = read_windows(options)

net = ByteTransformer(
    width=options.width,
    depth=options.depth,
    num_heads=options.heads,
    context=options.context,
).to(device)
groups = parameter_groups(net, weight_decay=0.1)  # not on norms and biases
optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
budget = options.epochs * len(train)  # of all workers together
model = GossipDataParallel(net, optimizer, budget_samples=budget, **options.parallel())
schedule = LambdaLR(optimizer, lambda _: learning_rate_factor(model.progress()))
model.also_checkpoint(schedule=schedule)
# Every worker sees the whole text, in its own order.
loader = whole_batches(train, options.batch_size, seed=model.worker_seed)

run = TrainingRun(model, options, len(train))
for windows in model.batches(loader):
    loss = next_byte_loss(model, windows.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    run.step(loss)
held_out = whole_batches(validation, options.batch_size)
run.finish("validation_bits_per_byte", lambda: bits_per_byte(net, held_out, device))
