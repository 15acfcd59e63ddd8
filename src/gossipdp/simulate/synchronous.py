"""The synchronous methods, for comparison: all-reduce and D-PSGD, in rounds on a virtual clock."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from gossipdp.simulate.population import Training
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.trace import Recorder, Trace

FloatArray = NDArray[np.float64]

CLOCK_TOLERANCE = 1e-9
"""Sums of step times may be off by this share: a round that ends when a record is due counts."""

MAX_SPARSE_SHARE = 0.1
"""Matrices with more entries than this share are multiplied as dense ones, which is quicker."""


# --- mixing --------------------------------------------------------------------------------


def mixing_matrix(graph: nx.Graph[int], *, lazy: bool = False) -> FloatArray:
    """Metropolis-Hastings weights: symmetric, non-negative, rows and columns sum to one.

        w_ij = 1 / (1 + max(deg_i, deg_j)) on edges,   w_ii = 1 - sum_j w_ij

    Source: Xiao, Boyd, Kim, "Distributed average consensus with least-mean-square deviation",
    2007. They need the degrees of neighbours only.

    Args:
        graph: ranks 0..n-1.
        lazy: return (I + W) / 2, whose eigenvalues are not negative. On a complete graph W itself
            is the mean: one round, and no rate to speak of.

    Returns:
        W; (n, n).
    """
    num_workers = len(graph)
    matrix = np.zeros((num_workers, num_workers))
    for i, j in graph.edges:
        matrix[i, j] = matrix[j, i] = 1.0 / (1.0 + max(graph.degree[i], graph.degree[j]))
    np.fill_diagonal(matrix, 1.0 - matrix.sum(axis=1))
    if lazy:
        matrix = 0.5 * (np.eye(num_workers) + matrix)
    return matrix


def second_eigenvalue(matrix: FloatArray) -> float:
    """The second largest absolute eigenvalue: the factor by which a round shrinks disagreement."""
    if len(matrix) == 1:
        return 0.0
    values = np.linalg.eigvalsh(matrix)
    # The largest is one, of the constant vector. What rounding leaves of a zero is a zero.
    gamma = max(abs(float(values[0])), abs(float(values[-2])))
    return gamma if gamma > len(matrix) * np.finfo(np.float64).eps else 0.0


def multiplications_per_step(gamma: float) -> int:
    """K = ceil(1 / sqrt(1 - gamma)): Chebyshev multiplications for each gradient step.

    After so many, disagreement is at most about half (1 / cosh(sqrt 2) = 0.46) of what it was,
    whatever the graph. Source: Scaman et al. 2017, section 4.2, who take the floor.
    """
    return math.ceil(1.0 / math.sqrt(1.0 - gamma))


class Mixing:
    """Round after round of multiplications by W, plain or, with ``gamma``, by Chebyshev.

        x_1     = W x_0
        x_{t+1} = (1 + omega_t) W x_t - omega_t x_{t-1}
        1 + omega_1 = 1 / (1 - gamma^2 / 2),   1 + omega_t = 1 / (1 - gamma^2 (1 + omega_{t-1}) / 4)

    with gamma the second largest absolute eigenvalue of W (0: omega stays 0). So x_t =
    T_t(W / gamma) / T_t(1 / gamma) x_0 with the Chebyshev polynomials T_t: of all polynomials of
    degree t in W that keep the mean, the one whose largest value over the eigenvalues
    [-gamma, gamma] is least. omega_t rises at once to

        omega = (1 - sqrt(1 - gamma^2)) / (1 + sqrt(1 - gamma^2))

    the constant weight of second-order gossip, and disagreement shrinks by sqrt(omega) a round:
    a gap 1 - gamma of W becomes about sqrt(2 (1 - gamma)).

    Source: Golub, Varga 1961; for gossip Arioli, Scott 2014, and Scaman et al. 2017 (algorithm 2).
    """

    def __init__(self, matrix: FloatArray, gamma: float = 0.0) -> None:
        is_sparse = np.count_nonzero(matrix) <= MAX_SPARSE_SHARE * matrix.size
        self._matrix: Any = sparse.csr_array(matrix) if is_sparse else matrix
        self._gamma = gamma
        self.restart()

    def restart(self) -> None:
        """Begin the recursion anew: the next multiplication is by W."""
        self._omega = 0.0
        self._before = np.zeros(0)

    def multiply(self, rows: FloatArray) -> FloatArray:
        """The next multiplication of rows of shape (n, d)."""
        omega, before, self._before = self._omega, self._before, rows
        mixed: FloatArray = self._matrix @ rows
        if omega:
            mixed *= 1.0 + omega
            mixed -= omega * before
        divisor = 4.0 if omega else 2.0
        self._omega = 1.0 / (1.0 - self._gamma**2 * (1.0 + omega) / divisor) - 1.0
        return mixed


# --- rounds --------------------------------------------------------------------------------


def run_allreduce(scenario: Scenario, on_progress: Callable[[float], None]) -> Trace:
    """Simulate data-parallel training by a ring all-reduce of the gradients at every step.

    Every worker computes, all wait for the slowest, then the gradients are averaged at the cost

        2 (n - 1) / n * model_bytes / bytes_per_s + 2 (n - 1) latency_s

    of the slowest link of the ring 0, 1, .., n-1, 0 (Patarasuk, Yuan 2009), and one and the same
    optimizer step is taken everywhere. Communication does not overlap with computation, as it may
    in part in PyTorch's DistributedDataParallel. A round counts the n edges of that ring as
    exchanges, whatever the scenario's graph.

    All start from rank 0's row. Float buffers stay each worker's own afterwards, and are judged by
    their mean as with the other methods; DistributedDataParallel sends rank 0's to all at each
    step.

    Without gradients (consensus) the rows themselves are averaged: one round, and they agree.
    """
    return _AllReduce(scenario, "allreduce", on_progress).run()


def run_dpsgd(
    scenario: Scenario, on_progress: Callable[[float], None], *, chebyshev: bool
) -> Trace:
    """Simulate D-PSGD: x <- W x - update, W the Metropolis-Hastings weights of the graph.

    The update is the optimizer's at each worker's own row and own momentum; float buffers are
    averaged alike. Source: Lian et al. 2017, algorithm 1.

    A worker computes its gradient, then sends its row to its neighbours, then waits for theirs of
    the same round; nobody waits for the others (local synchronisation). One network card serves
    all neighbours side by side, so that sending takes

        sum over neighbours of model_bytes / bytes_per_s, then latency_s to each of them.

    Communication does not overlap with computation, though Lian et al. allow it. A round counts
    all |E| edges as exchanges.

    With ``chebyshev`` each gradient step is followed by K multiplications by W, each with its own
    exchanges and waiting: x <- P_K(W) x - update with the Chebyshev polynomial of :class:`Mixing`
    and the K of :func:`multiplications_per_step`, as in multi-step dual accelerated gossip (Scaman
    et al. 2017). P_K(W) is symmetric, keeps the mean, and contracts everything else, so that this
    is as stable as D-PSGD. (The recursion running on across gradient steps is not: it would add
    heavy-ball momentum omega to the mean, for which the learning rate is not meant.)

    Without gradients (consensus) every round is one multiplication, and the Chebyshev recursion
    runs on through all rounds.

    A record shows the last round that all workers have ended: a worker that is ahead of others
    waits in it.
    """
    return _Dpsgd(scenario, "dpsgd-chebyshev" if chebyshev else "dpsgd", on_progress).run()


class _Rounds(ABC):
    """Round after round of all workers; the clock is a list of when each worker ended the last."""

    starts_alike: ClassVar[bool] = False

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        self.scenario = scenario
        self.ranks = range(scenario.num_workers)
        self.training = Training.of(scenario, momentum=False, starts_alike=self.starts_alike)
        self.population = self.training.population
        self.recorder = Recorder(scenario, method, self.training, on_progress)
        row = self.population.x[0]
        model_bytes = scenario.model_bytes or float(row.numel() * row.element_size())
        self.draw_transfer_s = scenario.links.begin(scenario.seed, model_bytes)
        self.edges: list[tuple[int, int]] = []
        """Each once for every time that a round uses it."""
        self.models_per_round = 0.0

    def run(self) -> Trace:
        draw_step_s = self.scenario.compute_time.begin(self.scenario.seed)
        recorder, num_workers = self.recorder, len(self.ranks)
        now_s, idle_s, num_rounds, goes_on = [0.0] * num_workers, 0.0, 0, True
        while True:
            computed_s = [begun_s + draw_step_s(rank) for rank, begun_s in enumerate(now_s)]
            for rank in self.ranks:
                recorder.interval(rank, "computing", now_s[rank], computed_s[rank])
            ended_s = self.communicate(computed_s)
            while goes_on and recorder.next_s < max(ended_s) * (1 - CLOCK_TOLERANCE):
                total_s = math.fsum(now_s)
                goes_on = recorder.record(
                    exchanges=num_rounds * len(self.edges),
                    gradient_steps=num_rounds * num_workers,
                    idle_share=idle_s / total_s if total_s else 0.0,
                )
            if not goes_on:
                break
            if self.training.source is None:
                self.agree()
            else:
                self.step(self.training.factor(max(now_s)))
            idle_s += math.fsum(ended_s) - math.fsum(computed_s)
            num_rounds, now_s = num_rounds + 1, ended_s
        trace = recorder.trace
        trace.worker_steps = [num_rounds] * num_workers
        used = np.bincount(np.array(self.edges, dtype=int).ravel(), minlength=num_workers)
        trace.worker_exchanges = (num_rounds * used).tolist()
        trace.num_events = num_rounds * (num_workers + len(self.edges))
        trace.models_sent = num_rounds * self.models_per_round
        return trace

    @abstractmethod
    def communicate(self, computed_s: list[float]) -> list[float]:
        """When each worker ends the round, given when it has computed."""

    @abstractmethod
    def step(self, factor: float) -> None:
        """Change the rows as a round with gradients does."""

    @abstractmethod
    def agree(self) -> None:
        """Change the rows as a round without gradients does."""


class _AllReduce(_Rounds):
    starts_alike = True

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        super().__init__(scenario, method, on_progress)
        self.edges = [(rank, rank + 1) for rank in self.ranks[:-1]]
        if len(self.ranks) > 2:
            self.edges.append((len(self.ranks) - 1, 0))
        self.models_per_round = 2.0 * (len(self.ranks) - 1)

    def communicate(self, computed_s: list[float]) -> list[float]:
        num_workers = len(computed_s)
        hops = 2 * (num_workers - 1)
        slowest_s = 0.0
        for i, j in self.edges:
            share_s = hops / num_workers * self.draw_transfer_s(i, j)
            slowest_s = max(slowest_s, share_s + hops * self.scenario.links.latency_s(i, j))
        all_computed_s = max(computed_s)
        end_s = all_computed_s + slowest_s
        for rank, computed in enumerate(computed_s):
            self.recorder.interval(rank, "waiting", computed, all_computed_s)
            self.recorder.interval(rank, "exchanging", all_computed_s, end_s)
        return [end_s] * num_workers

    def step(self, factor: float) -> None:
        training, population = self.training, self.population
        found = training.gradients(self.ranks, population.x)
        mean = found.values.mean(dim=0, keepdim=True)
        change = training.optimizer.changes(
            training.state, [0], population.trained[:1], mean, factor
        )
        changes = torch.cat([change.expand_as(found.values), found.buffer_changes], dim=1)
        population.step(self.ranks, changes)

    def agree(self) -> None:
        rows = self.population.x
        rows.copy_(rows.mean(dim=0).expand_as(rows))


class _Dpsgd(_Rounds):
    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        super().__init__(scenario, method, on_progress)
        graph = scenario.make_graph()
        matrix = mixing_matrix(graph)
        gamma = second_eigenvalue(matrix) if method == "dpsgd-chebyshev" else 0.0
        self.mixing = Mixing(matrix, gamma)
        self.neighbours = [sorted(graph.neighbors(rank)) for rank in self.ranks]
        trains = self.training.source is not None
        self.per_round = multiplications_per_step(gamma) if trains else 1
        self.edges = list(graph.edges) * self.per_round

    def communicate(self, computed_s: list[float]) -> list[float]:
        latency_s, interval = self.scenario.links.latency_s, self.recorder.interval
        ready_s = computed_s
        for _ in range(self.per_round):
            sent_s = [
                ready_s[rank] + sum(self.draw_transfer_s(rank, peer) for peer in peers)
                for rank, peers in enumerate(self.neighbours)
            ]
            ended_s = []
            for rank, peers in enumerate(self.neighbours):
                arrivals_s = [sent_s[peer] + latency_s(peer, rank) for peer in peers]
                ended_s.append(max(sent_s[rank], *arrivals_s) if peers else sent_s[rank])
                interval(rank, "exchanging", ready_s[rank], sent_s[rank])
                interval(rank, "waiting", sent_s[rank], ended_s[rank])
            ready_s = ended_s
        return ready_s

    def step(self, factor: float) -> None:
        training, population = self.training, self.population
        found = training.gradients(self.ranks, population.x)
        changes = training.changes(self.ranks, population.x, found, factor)
        # In double precision, since rounded weights would not sum to one: that moves the mean.
        rows = population.x.double().numpy()
        self.mixing.restart()
        for _ in range(self.per_round):
            rows = self.mixing.multiply(rows)
        population.x.copy_(torch.from_numpy(rows))
        population.step(self.ranks, changes)

    def agree(self) -> None:
        self.population.x = torch.from_numpy(self.mixing.multiply(self.population.x.numpy()))
