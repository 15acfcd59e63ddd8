"""What is trained in time_to_loss: clusters, a perceptron of 1M parameters, a timed compute.

The data are 200 Gaussian clusters in 64 dimensions, 20 of them at random for each of ten classes.
Most of a worker's samples come from its own quarter of the clusters, the others from all: the
shards are disjoint and uneven. Validation samples come from all clusters alike.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossipdp.tasks.workload import BatchLoader

NUM_FEATURES, NUM_CLASSES, CLUSTERS_A_CLASS = 64, 10, 20
CENTRE_SPREAD, OWN_SHARE = 1.6, 0.6
SAMPLES_A_WORKER, NUM_VALIDATION, NUM_CURVE = 8_192, 8_000, 2_000
WIDTH, NUM_LAYERS = 704, 4
BATCH_SIZE, PEAK_RATE, MOMENTUM, WEIGHT_DECAY = 32, 0.1, 0.9, 1e-4

DESCRIPTION = (
    f"{NUM_CLASSES * CLUSTERS_A_CLASS} Gaussian clusters in {NUM_FEATURES} dimensions, "
    f"{NUM_CLASSES} classes; {OWN_SHARE:.0%} of a worker's samples from its own quarter of the "
    f"clusters, no sample on two workers; a perceptron of {NUM_LAYERS} layers; SGD, batch "
    f"{BATCH_SIZE}, peak rate {PEAK_RATE:g}, momentum {MOMENTUM:g}, cosine schedule on the "
    "progress of the run"
)

Samples = tuple[Tensor, Tensor]


class Clusters:
    """The data; they follow from the seed alone, so that every process has the same."""

    def __init__(self, num_workers: int, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        every = torch.arange(NUM_CLASSES * CLUSTERS_A_CLASS)
        self._centres = CENTRE_SPREAD * torch.randn(
            len(every), NUM_FEATURES, generator=self._generator
        )
        self.validation = self._draw(NUM_VALIDATION, every)
        num_own = int(OWN_SHARE * SAMPLES_A_WORKER)
        self.shards: list[Samples] = []
        for rank in range(num_workers):
            own = self._draw(num_own, every[every % num_workers == rank])
            common = self._draw(SAMPLES_A_WORKER - num_own, every)
            self.shards.append((torch.cat([own[0], common[0]]), torch.cat([own[1], common[1]])))

    def _draw(self, num_samples: int, clusters: Tensor) -> Samples:
        chosen = torch.randint(len(clusters), (num_samples,), generator=self._generator)
        which = clusters[chosen]
        noise = torch.randn(num_samples, NUM_FEATURES, generator=self._generator)
        return self._centres[which] + noise, which // CLUSTERS_A_CLASS

    def loader(self, rank: int, seed: int) -> BatchLoader[Samples]:
        """The batches of one worker, in an order of its own for each seed."""
        inputs, labels = self.shards[rank]
        return BatchLoader(
            torch.arange(len(labels)),
            batch_size=BATCH_SIZE,
            seed=1_000 * seed + rank,
            gather=lambda chosen: (inputs[chosen], labels[chosen]),
        )


class TimedCompute:
    """The stand-in for an accelerator: real gradients that are there when a device would have them.

    A step takes ``duration_s``, a third of it forward and two thirds backward, in equal parts a
    layer. The values are computed by this machine's cores within that time; a wait makes up the
    rest. So each layer's gradient is there at its time, and a method that sends it while the
    backward pass goes on gains what it would gain on a device.
    """

    def __init__(self) -> None:
        self.computed_s = 0.0
        self._began_s = self._duration_s = 0.0

    def begin(self, duration_s: float) -> None:
        """A step begins now."""
        self._began_s, self._duration_s = time.monotonic(), duration_s
        self.computed_s += duration_s

    def wait(self, share: float) -> None:
        """Wait until this share of the step is over; return at once where it is already."""
        left_s = self._began_s + share * self._duration_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class Pace(nn.Module):
    """The identity after a layer; there the forward and the backward pass wait for the device."""

    def __init__(self, compute: TimedCompute, layer: int) -> None:
        super().__init__()
        self._compute, self._layer = compute, layer

    def forward(self, values: Tensor) -> Tensor:
        """Wait, and wait again when the gradient comes back."""
        return _PaceFunction.apply(values, self._compute, self._layer)


class _PaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, compute: TimedCompute, layer: int) -> Tensor:
        ctx.compute, ctx.layer = compute, layer
        compute.wait((layer + 1) / NUM_LAYERS / 3)
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.compute.wait((1 + 2 * (NUM_LAYERS - ctx.layer) / NUM_LAYERS) / 3)
        return gradient, None, None


def make_model(seed: int, compute: TimedCompute | None = None) -> nn.Sequential:
    """The perceptron; with ``compute`` its passes take the device's time."""
    torch.manual_seed(seed)
    widths = [NUM_FEATURES, *[WIDTH] * (NUM_LAYERS - 1), NUM_CLASSES]
    layers: list[nn.Module] = []
    for layer in range(NUM_LAYERS):
        layers.append(nn.Linear(widths[layer], widths[layer + 1]))
        if compute is not None:
            layers.append(Pace(compute, layer))
        if layer < NUM_LAYERS - 1:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def loss(model: nn.Module, batch: Samples) -> Tensor:
    """The mean cross-entropy of a batch."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


@dataclass(frozen=True)
class Score:
    """On validation samples: mean cross-entropy, and share classified correctly."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(parameters: Tensor, samples: Samples) -> Score:
    """Score the model of these parameters, all in one vector."""
    model = make_model(0)
    nn.utils.vector_to_parameters(parameters, model.parameters())
    outputs = model(samples[0])
    return Score(
        float(nn.functional.cross_entropy(outputs, samples[1])),
        float((outputs.argmax(dim=1) == samples[1]).double().mean()),
    )
