"""Training by local steps: workers train apart, and all average now and then.

It follows the paper in what is sent when and what is made of it; the code is our own. All start
from rank 0's row, and their buffers (BatchNorm statistics) are averaged where parameters are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gossipdp.dynamics import update
from gossipdp.dynamics.outer import OuterStep
from gossipdp_lab.simulate.rounds import Rounds
from gossipdp_lab.simulate.scenario import Scenario


class DiLoCo(Rounds):
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

    def step(self, factor: float) -> None:
        training, population = self.training, self.population
        found = training.gradients(self.ranks, population.x)
        population.step(self.ranks, training.changes(self.ranks, population.x, found, factor))
        if self.number % self.scenario.sync_every == 0:
            self._average()

    def agree(self) -> None:
        raise AssertionError("methods of local steps need gradients")

    def _average(self) -> None:
        rows, outer = self.population.x, self._outer
        mean = rows.mean(dim=0)
        trained = mean[: self.population.num_trained]
        brought = torch.zeros_like(trained)
        update.outer_step(trained, brought, self._base, self._momentum, outer.momentum, outer.lr)
        trained += brought
        self._base += brought
        self.population.put(slice(0, len(mean)), mean.expand_as(rows))
        for moment in self.training.moments_due(self._num_averages):
            moment.copy_(moment.mean(dim=0).expand_as(moment))

    @property
    def _num_averages(self) -> int:
        return self.number // self.scenario.sync_every
