"""The dynamics in float64, twice: as the paper writes them and as gossipdp holds them.

Plain functions that return new values, for tests and for reading. The fast in-place version
(``kernels``, ``state``) is proved equal to :class:`MomentumState`, and that one equal to
:class:`PaperState`, under random sequences of events.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class PaperState:
    r"""The pair (x, x_tilde) of the paper's equation (4).

    .. math::
        dx_i &= \eta(\tilde x_i - x_i)dt - \gamma g_i dN_i - \alpha\sum_j (x_i - x_j) dM_{ij} \\
        d\tilde x_i &= \eta(x_i - \tilde x_i)dt - \gamma g_i dN_i
                       - \tilde\alpha\sum_j (x_i - x_j) dM_{ij}

    with :math:`\alpha = 1/2`.
    """

    x: Tensor
    x_tilde: Tensor

    def flow(self, eta: float, duration: float) -> Self:
        """Solve the linear part for ``duration``: the sum stays, the difference decays."""
        generator = eta * duration * torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        # Not matrix_exp: for small matrices it is off by up to 1e-11.
        rates, modes = torch.linalg.eigh(generator)
        mixing = modes @ torch.diag(torch.exp(rates)) @ modes.T
        return type(self)(
            mixing[0, 0] * self.x + mixing[0, 1] * self.x_tilde,
            mixing[1, 0] * self.x + mixing[1, 1] * self.x_tilde,
        )

    def increment(self, step: Tensor) -> Self:
        """Add one gradient step: both copies get the same increment."""
        return type(self)(self.x + step, self.x_tilde + step)

    def exchange(self, delta: Tensor, alpha_tilde: float) -> Self:
        """Apply one exchange, with ``delta`` = x_i - x_j."""
        return type(self)(self.x - 0.5 * delta, self.x_tilde - alpha_tilde * delta)


@dataclass(frozen=True)
class MomentumState:
    r"""The pair (x, c) with c = x_tilde - x, which the optimizer's step leaves alone.

    flow for :math:`\Delta`, :math:`s = e^{-2\eta\Delta}`: x += (1 - s)/2 c, c *= s;
    gradient step: x += step; exchange: x -= delta/2, c -= (alpha_tilde - 1/2) delta.
    """

    x: Tensor
    c: Tensor

    @property
    def z(self) -> Tensor:
        """X + c/2 = (x + x_tilde)/2: its mean over workers moves only by gradient steps."""
        return self.x + 0.5 * self.c

    def flow(self, eta: float, duration: float) -> Self:
        s = torch.exp(torch.tensor(-2.0 * eta * duration, dtype=torch.float64))
        return type(self)(self.x + 0.5 * (1.0 - s) * self.c, s * self.c)

    def increment(self, step: Tensor) -> Self:
        return type(self)(self.x + step, self.c)

    def exchange(self, delta: Tensor, alpha_tilde: float) -> Self:
        return type(self)(self.x - 0.5 * delta, self.c - (alpha_tilde - 0.5) * delta)
