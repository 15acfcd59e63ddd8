r"""The outer step: a Nesterov step on what the optimizer did since a worker's last one.

Where exchanges are rare, many optimizer steps lie between two of them. DiLoCo (arXiv 2311.08105)
treats their sum as one large gradient and takes an outer step with momentum on it. Here each worker
does so by itself, chunk by chunk, at the start of every second of its exchanges:

.. math::
    g = x - \text{base}, \qquad m \leftarrow \mu m + g, \qquad u = \gamma (g + \mu m) - g, \qquad
    p \leftarrow p + u, \qquad \text{base} \leftarrow x

with :math:`p` the chunk's ``pending``, and the exchange follows. ``base`` is x without the
optimizer's own steps since the last outer step: a boundary adds to it exactly what it adds to x. So
:math:`g` is the sum of those steps alone, whatever exchanges and flows brought meanwhile, and
neither of them touches base or m. The step is local, so an exchange that fails after it harms
nothing, and the mean of x + c/2 over workers moves by optimizer and outer steps alone.

Two workers in lock-step, with an exchange and an outer step every H steps, take exactly DiLoCo's
steps. If workers exchange at their own times, each is asked for an exchange as often as it asks for
one. With an outer step in both, the outer momentum's memory was half as long, counted in optimizer
steps, and the loss was worse (benchmarks/NOTES.md): so it comes with every second exchange.

The optimizer may write x while the gossip thread takes the step. It reads each value of x once, and
the values read are the new base, so that no part of an optimizer's step is lost or counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gossipdp.rules import Checked, at_least_1, number, option, positive_number


@dataclass(frozen=True)
class OuterStep(Checked):
    r"""An outer step with exchanges; ``GossipDataParallel(..., outer=OuterStep())``.

    For rare exchanges (``comm_rate`` of 1/8 and less), as on slow links. With :math:`g` the sum of
    the optimizer's steps since this worker's last outer step, :math:`\mu` → ``momentum`` and
    :math:`\gamma` → ``lr``, the sum is replaced by a Nesterov step:

    .. math:: m \leftarrow \mu m + g, \qquad g \leftarrow \gamma (g + \mu m)

    ``momentum=0, lr=1`` changes nothing. In the long run the outer step multiplies what optimizers
    do by lr / (1 - momentum), by default 2, so the best learning rate of the optimizer may be a
    smaller one. It takes two more floats a parameter, as many bytes as AdamW's state; they are
    float32 if parameters have 16 bits.

    Args:
        momentum: the share of the last outer steps that goes on, from 0 to below 1.
        lr: the outer learning rate, above 0.
        every: one exchange in so many, asked for or answered, begins with an outer step. With 2 a
            worker takes one outer step for each exchange that it asks for, in the mean.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> OuterStep(momentum=0.9, lr=0.7)
        OuterStep(momentum=0.9, lr=0.7, every=2)

    Departures from DiLoCo: workers exchange in pairs and at their own times, and each holds an
    outer momentum of its own. That has one worker's noise, while DiLoCo's has the noise of the mean
    of all, so the momentum is smaller here (benchmarks/NOTES.md).
    """

    momentum: float = option(0.5, partial(number, below=1.0))
    lr: float = option(1.0, positive_number)
    every: int = option(2, at_least_1)
