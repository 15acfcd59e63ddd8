"""The convex programme behind `edge_rates`: a barrier method on the rates of the edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import linprog

from gossipdp.graph.spectrum import FloatArray, IndexArray, dense_spectrum, laplacian_matrix

RELATIVE_GAP = 1e-4
BARRIER_GROWTH = 4.0
NEWTON_TOLERANCE = 1e-7
MAX_NEWTON_STEPS = 200
SUFFICIENT_DECREASE = 0.1
LEAST_SLACK_LEFT = 0.3

REGULARISATION = 1e-11
"""Of a matrix with unit diagonal, against rounding; it slows the last digits at most."""


@dataclass(frozen=True)
class Solution:
    """Rates that solve the programme to within its gap."""

    rates: FloatArray
    below: float
    """t, just below lambda_2 of the rates."""

    lower_bound: float
    """No feasible rates have a smaller weighted sum (up to the tolerance of Newton's method)."""


@dataclass(frozen=True, eq=False)
class RateProgram:
    """minimise  a chi1 + b chi2  over rates lambda, under budgets of 1 and floors.

        chi1 = 1/t,   t = lambda_2:             L(lambda) - t P >= 0,  P = I - 11^T/n
        chi2 = q/2,   resistance of an edge:    d_e^T L(lambda)^+ d_e <= q
        sum_j lambda_ij <= 1,   lambda_e >= floor_e

    All of it is convex in (lambda, t, q): lambda_2 is concave in the rates, a resistance convex.
    A logarithmic barrier stands for each constraint; Newton's method follows its minimiser as the
    objective's weight tau grows. At the minimiser the objective is within nu / tau of the best,
    nu = 2 n + m (+ m where chi2 counts). With X = (L - t P + 11^T/n)^-1, W = D^T L^+ D:

        d/dlambda_e  -log det X^-1 = -d_e^T X d_e      second: (d_e^T X d_f)^2
        d/dlambda_f   resistance_e = -W_ef^2           second: 2 W_ef W_fg W_ge

    References:
        Boyd, Vandenberghe, Convex Optimization, 2004, chapter 11; Boyd et al. 2006 for the
        semidefinite form of fastest mixing. The programme with chi2 is ours.
    """

    num_workers: int
    edges: IndexArray
    floors: FloatArray

    def minimise(
        self,
        chi1_weight: float,
        chi2_weight: float,
        start: FloatArray,
        on_evaluation: Callable[[], None] = lambda: None,
    ) -> Solution:
        """Follow the barrier's path from the feasible rates ``start``.

        ``on_evaluation`` is called before each of some hundred steps, for progress.
        """
        rates = np.maximum(0.9 * start, 0.5 * (start + self.floors))
        spectrum = dense_spectrum(self.num_workers, self.edges, rates)
        point = np.concatenate(
            [rates, [0.5 * spectrum.lambda_2], [2.0 * float(spectrum.resistances.max())]]
        )
        counts_resistances = chi2_weight > 0
        if not counts_resistances:
            point = point[:-1]
        num_edges = len(self.edges)
        complexity = 2 * self.num_workers + num_edges * (2 if counts_resistances else 1)
        weights = (chi1_weight, chi2_weight)
        tau = complexity / self._objective(point, weights)
        while True:
            point = self._centre(point, tau, weights, on_evaluation)
            objective = self._objective(point, weights)
            if complexity / tau <= RELATIVE_GAP * objective:
                rates, below, _ = self._split(point, weights)
                return Solution(rates, below, objective - complexity / tau)
            tau *= BARRIER_GROWTH

    def lambda_2_bound(self, rates: FloatArray, below: float) -> float:
        """An upper bound on lambda_2 of all feasible rates, proved by duality.

        For any Z >= 0 of trace 1 on what sums to zero, lambda_2 <= tr(Z L) whatever the rates;
        the right side is linear in them, so that a linear programme gives its largest value.
        Taken is Z ~ (L - below P)^-1, the barrier's dual variable: with a solution's ``below``
        the bound is tight; just below lambda_2 it is the projector on its eigenvectors.
        """
        values, vectors = np.linalg.eigh(laplacian_matrix(self.num_workers, self.edges, rates))
        across = vectors[self.edges[:, 0], 1:] - vectors[self.edges[:, 1], 1:]
        weights = 1.0 / (values[1:] - below)
        best = linprog(
            -(across**2) @ (weights / weights.sum()),
            A_ub=self._incidence,
            b_ub=np.ones(self.num_workers),
            bounds=[(floor, 1.0) for floor in self.floors.tolist()],
            method="highs",
        )
        if best.status != 0:
            raise RuntimeError(f"the linear programme of the bound failed: {best.message}")
        assert best.fun is not None
        return -float(best.fun)

    @property
    def _incidence(self) -> FloatArray:
        """Which edge touches which worker. Shape (n, m)."""
        incidence = np.zeros((self.num_workers, len(self.edges)))
        incidence[self.edges.T, np.arange(len(self.edges))] = 1.0
        return incidence

    @staticmethod
    def _objective(point: FloatArray, weights: tuple[float, float]) -> float:
        chi1_weight, chi2_weight = weights
        if chi2_weight == 0:
            return chi1_weight / float(point[-1])
        return chi1_weight / float(point[-2]) + 0.5 * chi2_weight * float(point[-1])

    def _centre(
        self,
        point: FloatArray,
        tau: float,
        weights: tuple[float, float],
        on_evaluation: Callable[[], None],
    ) -> FloatArray:
        """Newton's method with backtracking on  tau objective - sum of log slacks."""
        slacks = self._slacks(point, weights)
        for _ in range(MAX_NEWTON_STEPS):
            on_evaluation()
            gradient, hessian = self._derivatives(point, tau, weights)
            # Scaled to a unit diagonal: rates near their floor are far stiffer than others.
            scale = 1.0 / np.sqrt(np.diagonal(hessian))
            scaled = hessian * np.outer(scale, scale)
            scaled[np.diag_indices_from(scaled)] += REGULARISATION
            step = -scale * cho_solve(cho_factor(scaled), scale * gradient)
            decrement = -float(gradient @ step)
            if decrement <= NEWTON_TOLERANCE:
                break
            length = 1.0
            while True:
                candidate = point + length * step
                reached = self._slacks(candidate, weights)
                # A slack that shrinks to nothing in one step takes many to grow again.
                if np.all(reached > LEAST_SLACK_LEFT * slacks):
                    change = tau * (
                        self._objective(candidate, weights) - self._objective(point, weights)
                    ) - float(np.log(reached / slacks).sum())
                    if change <= -SUFFICIENT_DECREASE * length * decrement:
                        break
                length *= 0.5
                if length < 1e-10:  # rounding: no further decrease can be seen
                    return point
            point, slacks = candidate, reached
        return point

    def _split(
        self, point: FloatArray, weights: tuple[float, float]
    ) -> tuple[FloatArray, float, float | None]:
        num_edges = len(self.edges)
        rest = point[num_edges:]
        return point[:num_edges], float(rest[0]), float(rest[1]) if weights[1] > 0 else None

    def _slacks(self, point: FloatArray, weights: tuple[float, float]) -> FloatArray:
        """What must stay positive, the eigenvalues of L - t P among it, in a fixed order."""
        rates, lambda_2, resistance = self._split(point, weights)
        laplacian = laplacian_matrix(self.num_workers, self.edges, rates)
        values, vectors = np.linalg.eigh(laplacian)
        slacks: list[FloatArray] = [
            np.array([lambda_2]),
            values[1:] - lambda_2,
            1.0 - self._incidence @ rates,
            rates - self.floors,
        ]
        if resistance is not None:
            across = vectors[self.edges[:, 0], 1:] - vectors[self.edges[:, 1], 1:]
            slacks.append(resistance - across**2 @ (1.0 / values[1:]))
        return np.concatenate(slacks)

    def _derivatives(
        self, point: FloatArray, tau: float, weights: tuple[float, float]
    ) -> tuple[FloatArray, FloatArray]:
        num_edges = len(self.edges)
        rates, lambda_2, resistance = self._split(point, weights)
        laplacian = laplacian_matrix(self.num_workers, self.edges, rates)
        values, vectors = np.linalg.eigh(laplacian)
        # Row e: d_e in the eigenvectors but the constant one.
        across = vectors[self.edges[:, 0], 1:] - vectors[self.edges[:, 1], 1:]
        inverse = 1.0 / (values[1:] - lambda_2)
        slack = 1.0 - self._incidence @ rates
        above = rates - self.floors

        gradient = np.zeros(len(point))
        hessian = np.zeros((len(point), len(point)))
        of_rates = np.s_[:num_edges]
        products = (across * inverse) @ across.T
        gradient[of_rates] = -np.diagonal(products) + self._incidence.T @ (1.0 / slack)
        gradient[of_rates] -= 1.0 / above
        hessian[of_rates, of_rates] = products**2
        hessian[of_rates, of_rates] += (self._incidence.T / slack**2) @ self._incidence
        hessian[np.arange(num_edges), np.arange(num_edges)] += 1.0 / above**2
        gradient[num_edges] = inverse.sum() - tau * weights[0] / lambda_2**2 - 1.0 / lambda_2
        hessian[num_edges, num_edges] = (
            (inverse**2).sum() + 2.0 * tau * weights[0] / lambda_2**3 + 1.0 / lambda_2**2
        )
        mixed = -((across * inverse) ** 2).sum(axis=1)
        hessian[of_rates, num_edges] = hessian[num_edges, of_rates] = mixed
        if resistance is not None:
            overlaps = (across / values[1:]) @ across.T
            room = resistance - np.diagonal(overlaps)
            squares = overlaps**2
            gradient[of_rates] -= squares @ (1.0 / room)
            gradient[-1] = 0.5 * tau * weights[1] - (1.0 / room).sum()
            hessian[of_rates, of_rates] += (squares / room**2) @ squares
            hessian[of_rates, of_rates] += 2.0 * overlaps * ((overlaps / room) @ overlaps)
            hessian[of_rates, -1] = hessian[-1, of_rates] = squares @ (1.0 / room**2)
            hessian[-1, -1] = (1.0 / room**2).sum()
        return gradient, hessian
