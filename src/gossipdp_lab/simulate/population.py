"""The state of all simulated workers, a row each, and their gradient steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gossipdp.dynamics import update
from gossipdp.dynamics.chunks import Moment
from gossipdp.parallel.moments import chosen_moments, decay_of, moments_due
from gossipdp.protocol.pairing import MomentsDue
from gossipdp_lab.simulate.objectives import Gradients, GradientSource
from gossipdp_lab.simulate.scenario import MakeOptimizer, Scenario


class Population:
    """The state of n workers as matrices, under the same arithmetic as on real workers.

    A row of ``x`` is a worker as others see it: its parameters and the changes by exchanges and
    flow (``x + pending`` of a real worker). ``c`` is the momentum of the trained columns; float
    buffers, in the columns after them, are averaged without. Without ``momentum`` there is no c.
    """

    def __init__(self, start: Tensor, num_trained: int, *, momentum: bool) -> None:
        self.x = start.clone()
        self.num_trained = num_trained
        self.c = torch.zeros_like(self.x[:, :num_trained]) if momentum else None
        self.theta = np.zeros(len(start))
        """The phase to which each row has been flowed."""
        # The sum of x + c/2 if gradient steps alone moved it.
        self.expected_sum = self.x[:, :num_trained].sum(dim=0, dtype=torch.float64)
        self.half_applied = torch.zeros(num_trained, dtype=torch.float64)
        """Change of the sum of x + c/2 by exchanges that only one end has applied yet."""

    @property
    def trained(self) -> Tensor:
        """Return the trained columns of ``x``; a view of shape (n, num_trained)."""
        return self.x[:, : self.num_trained]

    def flow(self, rank: int, theta: float) -> None:
        """Flow one row up to the phase ``theta``, which never goes back."""
        if theta <= self.theta[rank]:
            return
        if self.c is not None:
            s = math.exp(-2.0 * (theta - self.theta[rank]))
            update.flow(self.trained[rank], self.c[rank], 0.5 * (1.0 - s))
            self.c[rank].mul_(s)
        self.theta[rank] = theta

    def apply(self, rank: int, mine: Tensor, peers: Tensor, alpha_tilde: float) -> None:
        """Apply one end of an exchange, from the snapshots of both ends."""
        row, trained = self.x[rank], self.num_trained
        c = None if self.c is None else self.c[rank]
        update.exchange(row[:trained], c, mine[:trained], peers[:trained], 0.0, 1.0, alpha_tilde)
        if trained < len(row):
            update.exchange(row[trained:], None, mine[trained:], peers[trained:], 0.0, 1.0, 0.5)

    def step(self, ranks: Sequence[int], changes: Tensor) -> None:
        """Add the changes of gradient steps: rows of (k, d)."""
        if len(ranks) == 1:  # as asynchronous workers step: no copy of the row
            self.x[ranks[0]].add_(changes[0])
            self.expected_sum.add_(changes[0, : self.num_trained])
        else:
            rows = torch.tensor(ranks)
            self.x.index_copy_(0, rows, self.x.index_select(0, rows) + changes)
            self.expected_sum += changes[:, : self.num_trained].sum(dim=0, dtype=torch.float64)

    def consensus_distance(self) -> float:
        """Return (1/n) sum_i |x_i - mean|^2 over the trained columns."""
        centred = self.trained - self.trained.mean(dim=0)
        return float(centred.square().sum()) / len(self.x)

    def mean(self) -> Tensor:
        """Return the mean row of x + c/2, to which the flow leads; (d,)."""
        mean = self.x.mean(dim=0)
        if self.c is not None:
            mean[: self.num_trained] += 0.5 * self.c.mean(dim=0)
        return mean

    def drift(self) -> float:
        """Return the distance of the mean of x + c/2 from where gradient steps moved it.

        It is the Euclidean norm of the difference. Exchanges that both ends applied leave rounding
        errors only; those that one end has yet to apply (``half_applied``) do not count.
        """
        expected = (self.expected_sum + self.half_applied) / len(self.x)
        return float((self.mean()[: self.num_trained].double() - expected).norm())


class RowOptimizers:
    """The optimizers of n workers.

    Args:
        make: makes those of one worker.
        start: the trained parameters of all; (n, d).

    Attributes:
        state: what they keep, a row each, under torch's names; exchanges may average it.
    """

    def __init__(self, make: MakeOptimizer, start: Tensor) -> None:
        # One row and its gradient serve all workers: each optimizer keeps a state of its own.
        self._row, self._gradient = torch.zeros_like(start[0]), torch.zeros_like(start[0])
        self._optimizers = [self._begin(make([self._row])) for _ in start]
        self._row.zero_()
        widths: dict[str, int] = {}
        for _, name, value in self._kept(0):
            widths[name] = widths.get(name, 0) + value.numel()
        self.state = {name: start.new_zeros(len(start), width) for name, width in widths.items()}
        for rank in range(len(start)):
            ends = dict.fromkeys(widths, 0)
            for kept, name, value in self._kept(rank):
                begin, ends[name] = ends[name], ends[name] + value.numel()
                kept[name] = self.state[name][rank, begin : ends[name]].view_as(value)

    def _begin(self, made: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
        optimizers = [made] if isinstance(made, Optimizer) else list(made)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]
                for values in group["params"]:
                    begin = values.storage_offset()
                    values.grad = self._gradient[begin : begin + values.numel()].view_as(values)
            optimizer.step()  # it makes its state, which the views of zeros replace
            for kept in optimizer.state.values():
                for name, value in kept.items():
                    # A first step with zeros may leave an epsilon (Adamax).
                    is_new = isinstance(value, Tensor) and bool((value.abs() > 1e-7).any())
                    if name != "step" and is_new:
                        raise ValueError(
                            f"the simulator begins with zeros, and {type(optimizer).__name__} "
                            f"begins with another {name!r}: take another optimizer"
                        )
        return optimizers

    def _kept(self, rank: int) -> list[tuple[dict[str, Tensor], str, Tensor]]:
        """Return what a worker's optimizers keep of each parameter: where, its name, the tensor."""
        found = []
        for optimizer in self._optimizers[rank]:
            for kept in optimizer.state.values():
                kept["step"] = torch.zeros(())
                found += [
                    (kept, name, value)
                    for name, value in kept.items()
                    if name != "step" and value is not None
                ]
        return found

    def of(self, rank: int) -> list[Optimizer]:
        """Return the optimizers of one worker."""
        return self._optimizers[rank]

    @torch.no_grad()
    def changes(self, ranks: Sequence[int], x: Tensor, gradients: Tensor, factor: float) -> Tensor:
        """Return the change of its row by one step of each of ``ranks``; (k, d).

        Args:
            ranks: k distinct ranks.
            x: their trained parameters; (k, d).
            gradients: at ``x``; (k, d).
            factor: multiplies the learning rates.
        """
        changes = torch.empty_like(x)
        for place, rank in enumerate(ranks):
            self._row.copy_(x[place])
            self._gradient.copy_(gradients[place])
            for optimizer in self._optimizers[rank]:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * factor
                optimizer.step()
            torch.sub(self._row, x[place], out=changes[place])
        return changes


class Training:
    """Gradient steps, evaluated at the parameters at their start and applied at their end.

    A real worker does the same: its parameters do not change under a forward and backward pass.
    Therefore the gradients of all steps under way can be evaluated together, in one batch, when
    the first of them is needed. The gradient of a step does not depend on that.

    Without a ``source`` (consensus) steps only count. The learning rate follows ``schedule``, a
    function of the share of ``end_s`` that has passed.
    ``exchange_moments`` are the optimizer's tensors that exchanges average: True for the library's
    choice, or their periods by name.
    """

    def __init__(
        self,
        source: GradientSource | None,
        optimizer: MakeOptimizer,
        population: Population,
        *,
        schedule: Callable[[float], float] | None = None,
        end_s: float = 1.0,
        exchange_moments: bool | Mapping[str, int] = False,
    ) -> None:
        self.source = source
        self.population = population
        self.optimizers = None if source is None else RowOptimizers(optimizer, population.trained)
        self._state = {} if self.optimizers is None else self.optimizers.state
        self.steps = [0] * len(population.x)
        """Gradient steps that each worker has ended."""
        self._schedule, self._end_s = schedule, end_s
        self._starts = torch.zeros_like(population.x)
        self._factors = [1.0] * len(population.x)
        self._under_way: dict[int, None] = {}
        self._found: dict[int, Gradients] = {}
        self._is_default = exchange_moments is True
        named = set() if isinstance(exchange_moments, bool) else set(exchange_moments)
        if unknown := sorted(named - self._state.keys()):
            raise ValueError(
                f"exchange_moments names {', '.join(unknown)}, which the optimizer does not keep; "
                f"choose among {', '.join(sorted(self._state)) or 'none'}"
            )
        own = [] if self.optimizers is None else self.optimizers.of(0)
        chosen = chosen_moments(exchange_moments, own)
        moments: dict[str, Moment] = {}
        for each, periods in zip(own, chosen, strict=True):
            for name, period in periods.items():  # of all optimizers in one row
                moments.setdefault(name, Moment(name, period, decay_of(name, each)))
        self._moments = list(moments.values())

    @classmethod
    def of(cls, scenario: Scenario, *, momentum: bool, starts_alike: bool = False) -> Training:
        """Make the rows of a scenario and their training; all are rank 0's if they start alike."""
        begun = scenario.objective.begin(scenario.num_workers, scenario.seed)
        source = begun if scenario.objective.has_gradients else None
        start = begun.start
        if starts_alike and source is not None:
            start = start[:1].expand_as(start)
        population = Population(start, begun.num_trained, momentum=momentum)
        return cls(
            source,
            scenario.optimizer,
            population,
            schedule=scenario.schedule,
            end_s=scenario.end_s,
            exchange_moments=scenario.exchange_moments,
        )

    def start_step(self, rank: int, now_s: float) -> None:
        """Begin a step of a worker at its current row."""
        if self.source is not None:
            self._starts[rank] = self.population.x[rank]
            self._factors[rank] = self.factor(now_s)
            self._under_way[rank] = None

    def end_step(self, rank: int) -> None:
        """Apply the step that the worker began last."""
        self.steps[rank] += 1
        if self.source is None:
            return
        if rank not in self._found:
            ranks = sorted(self._under_way)
            self._under_way.clear()
            found = self.gradients(ranks, self._starts.index_select(0, torch.tensor(ranks)))
            self._found.update(zip(ranks, found.rows(), strict=True))
        # The optimizer steps now, not before: exchanges may have averaged its moments meanwhile.
        start, factor = self._starts[rank : rank + 1], self._factors[rank]
        changes = self.changes([rank], start, self._found.pop(rank), factor)
        self.population.step([rank], changes)

    def factor(self, now_s: float) -> float:
        """Return the factor on the learning rate of a step that starts now."""
        if self._schedule is None:
            return 1.0
        return self._schedule(min(1.0, now_s / self._end_s))

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        """Return the next gradients of ``ranks`` at rows ``x``."""
        assert self.source is not None
        return self.source.gradients(ranks, x)

    def changes(self, ranks: Sequence[int], x: Tensor, found: Gradients, factor: float) -> Tensor:
        """Return the changes of their rows by the steps of ``ranks``; (k, d)."""
        assert self.optimizers is not None
        trained = x[:, : self.population.num_trained]
        changes = self.optimizers.changes(ranks, trained, found.values, factor)
        if found.buffer_changes.numel():
            changes = torch.cat([changes, found.buffer_changes], dim=1)
        return changes

    def moments_due(self) -> MomentsDue | None:
        """Return what says when one worker's moments travel: the library's rule."""
        return moments_due(self._moments, is_default=self._is_default)

    def travelling(self, rank: int, periods: Collection[int]) -> list[tuple[Tensor, float]]:
        """Return a worker's moments of these periods, each with its mass 1 - beta^t."""
        steps = self.steps[rank]
        return [
            (self._state[each.name][rank], replace(each, steps=steps).mass)
            for each in self._moments
            if each.period in periods
        ]
