"""Moments: tensors that an optimizer keeps of parameters, averaged beside them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gossipdp.dynamics import update
from gossipdp.dynamics.chunks import Chunk, Role


@dataclass
class Moment:
    """One tensor that an optimizer keeps of each parameter, such as Adam's ``exp_avg_sq``.

    Attributes:
        name: in the optimizer's state.
        period: one exchange in so many carries it.
        decay: the share of it that a step keeps (beta); 0 if the optimizer corrects no bias.
        steps: the optimizer's age t; 0: it has no such tensor yet. Written by the main thread.
        is_unsound: True if some of it could not be sent. Written by the gossip thread.
    """

    name: str
    period: int
    decay: float = 0.0
    steps: int = 0
    is_unsound: bool = False

    @property
    def mass(self) -> float:
        """The divisor 1 - beta^t of the optimizer's bias correction; 0 before its first step."""
        return 1.0 - self.decay**self.steps


class MomentChunk(Chunk):
    r"""A chunk of a moment, in the optimizer's own memory.

    Workers average the corrected moment :math:`\hat v = v / (1 - \beta^t)`, since their ages t
    differ. Its present value is ``weight x / mass + pending``, with the present mass
    :math:`1 - \beta^t`; an exchange halves both and adds half of the peer's. So a second moment
    stays positive, however many steps the optimizer makes between snapshot and boundary.

    If v itself were averaged, workers at t = 20 and t = 400 (beta 0.999) would then take steps of a
    third and of 1.4 times their size.

    Zeros are not averaged. A chunk sends them, and takes nothing in that exchange, if its optimizer
    has made no step, or if a value is not finite in the precision in which it travels: after one
    huge gradient a second moment is infinite for good, beside finite parameters.
    """

    def __init__(
        self, role: Role, x: Tensor, pending: Tensor, c: Tensor | None, moment: Moment
    ) -> None:
        super().__init__(role, x, pending, c)
        self.weight = 1.0
        self._moment = moment
        self.is_square = moment.name == "exp_avg_sq" and x.dtype == torch.float32
        self._gives = False  # in this exchange; the gossip thread's

    # Under the lock. Each method reads the mass once, as the main thread may change it.

    def _additions(self, share: float) -> list[Callable[[], object]]:
        mass = self._moment.mass
        if mass == 0.0:  # the optimizer was reset since
            return [self._reset]
        return [
            partial(self.pending.mul_, mass),
            partial(self.pending.add_, self.x, alpha=self.weight),
            partial(self.x.copy_, self.pending),
            self.pending.zero_,  # a rounding remainder would stay while x shrinks
            partial(setattr, self, "weight", 1.0),
        ]

    def _write(self, out: Tensor) -> None:
        values = torch.mul(self.pending, self._moment.mass, out=update.scratch(self.pending))
        torch.add(values, self.x, alpha=self.weight, out=out)

    def _snapshot(self, out: Tensor, share: float) -> bool:
        mass = self._moment.mass
        self._gives = mass != 0.0
        if self._gives:
            torch.add(self.pending, self.x, alpha=self.weight / mass, out=out)
            self._gives = update.is_finite(out)
            self._moment.is_unsound |= not self._gives
        if not self._gives:
            out.zero_()
        return True

    def _exchange(
        self, mine: Tensor, peers: Tensor, flow: tuple[float, float], alpha_tilde: float
    ) -> float:
        """Average, and return 0: the distance is not worth its passes."""
        theirs = update.scratch(self.pending).copy_(peers)
        if not update.is_finite(theirs):
            return math.inf
        has_any = bool(theirs.sum()) or bool(theirs.any())  # the sum is 20 times as fast
        if has_any and self._gives:
            self.pending.add_(theirs).mul_(0.5)
            self.weight *= 0.5
        return 0.0

    def _reset(self) -> None:
        self.weight = 1.0
        super()._reset()
