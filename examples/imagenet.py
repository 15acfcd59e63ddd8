"""The paper's second training, ResNet-50 on ImageNet, as an open loop.

    gossipdp run -n 4 examples/imagenet.py --data data
    torchrun --nproc-per-node 4 examples/imagenet.py --data data --method allreduce

``gossipdp train imagenet --workers 4 --data data`` does the same.
"""

import torch
import tyro
from torch.nn.functional import cross_entropy

from gossipdp import GossipDataParallel, large_batch_schedule, parameter_groups
from gossipdp.recipes.augmentation import normalize, random_flip
from gossipdp.recipes.batches import whole_batches
from gossipdp.recipes.imagenet import accuracy
from gossipdp.recipes.imagenet_data import DEVIATION, MEAN, open_imagenet
from gossipdp.recipes.jpeg_batches import JpegBatches
from gossipdp.recipes.options import ImageNetOptions
from gossipdp.recipes.recipe import worker_device
from gossipdp.recipes.resnet import resnet50
from gossipdp.recipes.training import TrainingRun


def main() -> None:
    """Train as one worker, together with those that the launcher started."""
    options = tyro.cli(ImageNetOptions)
    torch.manual_seed(options.seed)
    device = worker_device(options.device)
    files = open_imagenet(options.data)
    train = JpegBatches(files.train, size=224, part="random")  # a random box of each image
    validation = JpegBatches(files.validation, size=224, part="middle")

    net = resnet50(len(files.synsets)).to(device, memory_format=torch.channels_last)
    groups = parameter_groups(net, weight_decay=5e-4)  # not on norms and biases
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    budget = options.epochs * len(train)  # of all workers together
    model = GossipDataParallel(net, optimizer, budget_samples=budget, **options.parallel())
    schedule = large_batch_schedule(
        optimizer,
        model.progress,
        model.num_workers,  # the rate of one worker, times their number after the warm-up
        warmup=min(1.0, 5 / options.epochs),
        milestones=(30 / 90, 60 / 90, 80 / 90),
    )
    model.also_checkpoint(schedule=schedule)
    # Every worker sees all images, in its own order; other processes decode them.
    torch.manual_seed(model.worker_seed)
    processes = options.loader_processes
    loader = whole_batches(train, options.batch_size, seed=model.worker_seed, processes=processes)

    run = TrainingRun(model, options, len(train))
    for images, labels in model.batches(loader):
        images = normalize(random_flip(images.to(device)), MEAN, DEVIATION)
        loss = cross_entropy(model(images), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.step(loss)
    held_out = whole_batches(validation, options.batch_size, processes=processes)
    run.finish("validation_accuracy", lambda: accuracy(net, held_out, device))


if __name__ == "__main__":  # loader processes may import this file
    main()
