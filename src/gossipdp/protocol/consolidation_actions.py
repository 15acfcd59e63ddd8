"""What a consolidation asks its driver to do; the driver performs it in order.

The machine does no arithmetic and holds no payload: chunks are numbers to it. Data frames go on
the link that is there; without one the driver drops them, for they are asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gossipdp.protocol.actions import Send
from gossipdp.protocol.consolidation_messages import ConsolidationMessage, Epoch


@dataclass(frozen=True)
class Prepare:
    """Set the sums of the float chunks to this worker's input, which stays where it is.

    The first time, flow to infinity before. Sums and results share one buffer: partial sums are
    added to it, results land in it. A frame that is being sent from it must be gone first:
    dropped if none of it was sent, else its link closed.
    """


@dataclass(frozen=True)
class SendPartial:
    """Send the sum of ``chunk`` to ``peer`` as a Partial frame of ``epoch``."""

    peer: int
    epoch: Epoch
    chunk: int


@dataclass(frozen=True)
class FinishChunk:
    """The sum of ``chunk`` is complete: divide it by ``num_members``; it is the result."""

    chunk: int
    num_members: int


@dataclass(frozen=True)
class SendResult:
    """Send ``chunk`` of the result ``origin`` to ``peer`` as a Result frame.

    After COMMIT too, when the result stands in the parameters.
    """

    peer: int
    origin: Epoch
    chunk: int


@dataclass(frozen=True)
class MeasureDistance:
    """Compute |input - result|² in float64; answer with ``distance_measured(origin, ...)``."""

    origin: Epoch


@dataclass(frozen=True)
class Commit:
    """Put the result in the place of the input; it is final once ``Finished`` follows."""

    origin: Epoch
    consensus_distance: float
    num_members: int


@dataclass(frozen=True)
class Finished:
    """All live workers have committed: this worker may leave."""


DataAction: TypeAlias = (
    Prepare | SendPartial | FinishChunk | SendResult | MeasureDistance | Commit | Finished
)
"""What the driver does to the parameters."""
ConsolidationAction: TypeAlias = Send[ConsolidationMessage] | DataAction
Actions: TypeAlias = list[ConsolidationAction]
