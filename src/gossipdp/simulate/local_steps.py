"""Training by local steps: workers train apart, and average now and then, or a little at a time.

Each follows its paper in what is sent when and what is made of it; the code is our own. All start
from rank 0's row, and their buffers (BatchNorm statistics) are averaged where parameters are.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from gossipdp.dynamics import update
from gossipdp.dynamics.outer import OuterStep
from gossipdp.simulate.rounds import Rounds
from gossipdp.simulate.scenario import Scenario


class LocalSteps(Rounds):
    """Each worker takes a step of its own, then :meth:`mix`."""

    def step(self, factor: float) -> None:
        training, population = self.training, self.population
        found = training.gradients(self.ranks, population.x)
        changes = training.changes(self.ranks, population.x, found, factor)
        population.step(self.ranks, changes)
        self.mix()

    def agree(self) -> None:
        raise AssertionError("methods of local steps need gradients")

    @abstractmethod
    def mix(self) -> None:
        """What is sent makes of the rows, after their steps."""


class DiLoCo(LocalSteps):
    """H steps apart, then an all-reduce of what they did, and an outer Nesterov step.

        g = mean_i x_i - base,   m = mu m + g,   base = x_i = base + lr (g + mu m)

    every ``sync_every`` = H rounds. With momentum 0 and lr 1 it is local SGD. The paper's mu is 0.9
    and its lr 0.7, our defaults here. With ``exchange_moments`` the optimizers' moments are
    averaged at every so many of these steps.

    Source: Douillard et al. 2023, arXiv 2311.08105, algorithm 1.
    """

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        super().__init__(scenario, method, on_progress)
        self._outer = scenario.outer or OuterStep(momentum=0.9, lr=0.7)
        self._base = self.population.trained[0].clone()
        self._momentum = torch.zeros_like(self._base)

    def communicate(self, computed_s: list[float]) -> list[float]:
        if self.number % self.scenario.sync_every:
            return computed_s
        return self.all_reduced(computed_s, self.training.models_due(self._num_averages))

    def mix(self) -> None:
        if self.number % self.scenario.sync_every:
            return
        rows, num_trained = self.population.x, self.population.num_trained
        mean = rows.mean(dim=0)
        self.outer_step(slice(0, num_trained), mean[:num_trained])
        self.population.put(slice(0, len(mean)), mean.expand_as(rows))
        for moment in self.training.moments_due(self._num_averages):
            moment.copy_(moment.mean(dim=0).expand_as(moment))

    def outer_step(self, columns: slice, mean: Tensor) -> None:
        """The outer step of these columns, which moves their mean row."""
        base, m, brought = self._base[columns], self._momentum[columns], torch.zeros_like(mean)
        update.outer_step(mean, brought, base, m, self._outer.momentum, self._outer.lr)
        mean += brought
        base += brought

    @property
    def _num_averages(self) -> int:
        return self.number // self.scenario.sync_every


class StreamingDiLoCo(DiLoCo):
    """DiLoCo by fragments of the parameters in turn, sent while the next steps are computed.

    Each of P ``fragments`` is averaged every H rounds, H/P rounds after the one before it. Its
    average of round k arrives ``overlap_steps`` = tau rounds later: a worker waits only if the
    links take longer. Then the fragment's outer step is taken, and what the worker has learned
    since is mixed with it,

        x_i = mixing x_i + (1 - mixing) base

    The paper's mixing is 0.5. Its fragments are sets of layers, ours pieces of equal length.

    Source: Douillard et al. 2025, arXiv 2501.18512, algorithm 2.
    """

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        super().__init__(scenario, method, on_progress)
        every, parts = scenario.sync_every, scenario.fragments
        cuts = [self.population.num_trained * part // parts for part in range(parts + 1)]
        self._columns = [slice(*ends) for ends in pairwise(cuts)]
        self._sent_at = [every * (part + 1) // parts % every for part in range(parts)]
        """The round, modulo H, at the end of which a fragment is sent."""
        self._means: dict[int, Tensor] = {}
        self._arrive_s: dict[int, float] = {}

    def communicate(self, computed_s: list[float]) -> list[float]:
        for part in self._sent(self.number):
            cost_s = self.all_reduce_s(1 / self.scenario.fragments)
            self._arrive_s[part] = max(computed_s) + cost_s
        landed = self._sent(self.number - self.scenario.overlap_steps)
        arrived_s = max([self._arrive_s.pop(part) for part in landed], default=0.0)
        for rank, computed in enumerate(computed_s):
            self.recorder.interval(rank, "waiting", computed, max(computed, arrived_s))
        return [max(computed, arrived_s) for computed in computed_s]

    def mix(self) -> None:
        rows = self.population.x
        for part in self._sent(self.number):
            self._means[part] = rows[:, self._columns[part]].mean(dim=0)
        for part in self._sent(self.number - self.scenario.overlap_steps):
            columns, base = self._columns[part], self._means.pop(part)
            self.outer_step(columns, base)
            mixed = torch.lerp(
                base.expand_as(rows[:, columns]), rows[:, columns], self.scenario.mixing
            )
            self.population.put(columns, mixed)

    def _sent(self, number: int) -> list[int]:
        """The fragments that were sent at the end of a round."""
        turn = number % self.scenario.sync_every
        return [part for part, at in enumerate(self._sent_at) if at == turn and number > 0]


class NoLoCo(LocalSteps):
    """H steps apart, then each averages with one other, drawn at random, under its own momentum.

        delta_i = mu delta_i + lr mean(theta - phi) - gamma (phi_i - mean(phi))
        phi_i = phi_i + delta_i,   theta_i = phi_i

    with the slow rows phi, and means over the pair; with an odd number one stays alone. A pair
    sends both theta - phi and phi. The last term draws the pair together. Ours has
    gamma = (mu + sqrt(2 + mu^2)) / 2; any between 0 and 2 + 2 mu damps the difference of two. By
    default mu is 0.5 and lr 0.7.

    Source: Kolehmainen et al. 2025, arXiv 2506.10911. Their pipelines of random routes are left
    out: each worker holds the whole model.
    """

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        super().__init__(scenario, method, on_progress)
        self._outer = scenario.outer or OuterStep(momentum=0.5, lr=0.7)
        self._gamma = (self._outer.momentum + math.sqrt(2 + self._outer.momentum**2)) / 2
        self._slow = self.population.x.clone()
        self._delta = torch.zeros_like(self._slow)
        self._random = Random(f"{scenario.seed} pairs")
        self._partners = list(self.ranks)

    def communicate(self, computed_s: list[float]) -> list[float]:
        if self.number % self.scenario.sync_every:
            return computed_s
        drawn = self._random.sample(self.ranks, len(self.ranks))
        self._partners = list(self.ranks)
        for i, j in zip(drawn[::2], drawn[1::2], strict=False):
            self._partners[i], self._partners[j] = j, i
        peers = [[peer] if peer != rank else [] for rank, peer in enumerate(self._partners)]
        return self.sent_to(computed_s, peers, models=2.0)

    def mix(self) -> None:
        if self.number % self.scenario.sync_every:
            return
        partners, slow = torch.tensor(self._partners), self._slow
        learned = self.population.x - slow
        self._delta.mul_(self._outer.momentum)
        self._delta.add_(learned + learned[partners], alpha=0.5 * self._outer.lr)
        self._delta.sub_(slow - slow[partners], alpha=0.5 * self._gamma)
        slow.add_(self._delta)
        self.population.put(slice(0, slow.shape[1]), slow)


class Sparta(LocalSteps):
    """At every step a random ``share`` of the parameters is averaged over all workers.

    Each parameter is drawn by itself, the same ones at all workers; a share of 1 is an all-reduce
    of parameters. The authors share 0.05% to 0.5%, and may average values that are some steps old;
    here all wait.

    Source: Beton et al. 2025, "Improving the efficiency of distributed training using sparse
    parameter averaging", OpenReview stFPf3gzq1.
    """

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        super().__init__(scenario, method, on_progress)
        self._generator = torch.Generator().manual_seed(scenario.seed)

    def communicate(self, computed_s: list[float]) -> list[float]:
        return self.all_reduced(computed_s, self.scenario.share)

    def mix(self) -> None:
        rows = self.population.x
        drawn = torch.rand(rows.shape[1], generator=self._generator) < self.scenario.share
        columns = drawn.nonzero().flatten()
        rows[:, columns] = rows[:, columns].mean(dim=0)
