"""The paper's first training, ResNet-18 on CIFAR-10, as an open loop.

    gossipdp run -n 4 examples/cifar10.py --data data
    torchrun --nproc-per-node 4 examples/cifar10.py --data data --method allreduce

``gossipdp train cifar10 --workers 4 --data data`` does the same.
"""

import torch
import tyro
from torch.nn.functional import cross_entropy

from gossipdp import GossipDataParallel, large_batch_schedule, parameter_groups
from gossipdp.recipes.augmentation import normalize, random_crop_and_flip
from gossipdp.recipes.batches import whole_batches
from gossipdp.recipes.cifar10 import TensorBatches, accuracy
from gossipdp.recipes.cifar10_data import DEVIATION, MEAN, read_cifar10
from gossipdp.recipes.options import Cifar10Options
from gossipdp.recipes.recipe import worker_device
from gossipdp.recipes.resnet import cifar_resnet18
from gossipdp.recipes.training import TrainingRun

options = tyro.cli(Cifar10Options)
torch.manual_seed(options.seed)
device = worker_device(options.device)
images = read_cifar10(options.data)
train, test = images.train.to(device), images.test.to(device)

net = cifar_resnet18().to(device, memory_format=torch.channels_last)
groups = parameter_groups(net, weight_decay=5e-4)  # not on norms and biases
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
budget = options.epochs * len(train)  # of all workers together
model = GossipDataParallel(net, optimizer, budget_samples=budget, **options.parallel())
schedule = large_batch_schedule(
    optimizer,
    model.progress,
    model.num_workers,  # the rate of one worker, times their number after the warm-up
    warmup=min(1.0, 5 / options.epochs),
    milestones=(0.5, 0.75),
)
model.also_checkpoint(schedule=schedule)
# Every worker sees all images, in its own order and with its own crops.
torch.manual_seed(model.worker_seed)
loader = whole_batches(TensorBatches(train), options.batch_size, seed=model.worker_seed)

run = TrainingRun(model, options, len(train))
for images, labels in model.batches(loader):
    images = normalize(random_crop_and_flip(images, padding=4), MEAN, DEVIATION)
    loss = cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    run.step(loss)
run.finish("test_accuracy", lambda: accuracy(net, test))
