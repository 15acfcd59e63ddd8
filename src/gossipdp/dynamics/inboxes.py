"""Two inboxes: on a device that queues, no step waits for an exchange, and no exchange for a step.

On a GPU the boundary is queued behind the step, so an exchange whose turn at a chunk comes after it
would wait for the end of that step. So each chunk of trained parameters has two pendings there,
``pending`` and ``taken``, and what others see is ``x + pending + taken``:

* Exchanges add to ``pending``, and c is theirs alone.
* A boundary that finds something in ``pending`` swaps the two, under the lock, and then queues
  ``x += taken``, ``taken = 0`` behind the step. Before that it waits until the boundary before is
  done (:class:`~gossipdp.dynamics.device.Credit`), so exchanges are given a ``pending`` that the
  device no longer works on. The main stream waits for what exchanges have queued, which is short
  and waits for nothing.

What is in either is in x once, as soon as the device has come to it, so the mean of x + c/2 over
the workers is conserved. Two things differ from host memory:

* A snapshot may read ``x`` and ``taken`` while a boundary moves values from one to the other, and
  count some of them twice, for the length of two kernels in the length of a step. As both ends of
  an exchange use that snapshot, nothing is lost.
* Flow needs c, so exchanges do it: the second of two gives x the flow of the time between them,
  exactly, but later than in the paper's algorithm 1. If no exchange comes until half of c has
  decayed, a boundary does it, and waits for the step.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gossipdp.dynamics import update
from gossipdp.dynamics.chunks import Chunk, Role

OVERDUE_LEFT = 0.5
"""A boundary flows if so little is left of the c that the last exchange left."""


class InboxChunk(Chunk):
    """A chunk of trained parameters with two inboxes; see the module.

    Attributes:
        taken: what a boundary has taken, which is in x as soon as the device has come to it.
        taken_number: which of the segment's two inboxes that is.
        is_taken: True if it was taken, but not yet queued for x. The main thread's.
    """

    def __init__(self, x: Tensor, pending: Tensor, c: Tensor | None, taken: Tensor) -> None:
        super().__init__(Role.TRAINED, x, pending, c)
        self.taken = taken
        self.taken_number = 1
        self.is_taken = False

    # The main thread's part.

    @property
    def is_filled(self) -> bool:
        """True if a boundary has anything to take, or to add; read without the lock."""
        return self.has_pending or self.is_taken

    def is_due(self, theta: float) -> bool:
        """Return True if the flow cannot wait for an exchange any longer."""
        share, left = self._flow(theta)
        return share > 0.0 and left < OVERDUE_LEFT * self._left(self.theta)

    def take(self) -> bool:
        """Swap the inboxes, if there is anything to take; return False if the chunk is in use.

        Call ``follow_gossip()`` of the device before adding ``taken``.
        """
        locked: list[bool] = []
        try:
            locked.extend(map(self.lock.acquire, (False,)))  # see Chunk.boundary
            if True not in locked:
                return False
            if self.has_pending and not self.is_taken:
                swapped = {
                    "pending": self.taken,
                    "taken": self.pending,
                    "taken_number": 1 - self.taken_number,
                    "has_pending": False,
                    "is_taken": True,
                }
                self.__dict__.update(swapped)  # one call of C
        finally:
            if True in locked:
                self.lock.release()
        return True

    # Under the lock.

    def _brought(self) -> Tensor:
        return torch.add(self.pending, self.taken, out=update.scratch(self.pending, 2))

    def _additions(self, share: float) -> list[Callable[[], object]]:
        """Return those of a boundary that has waited for the step, and adds both."""
        taken = update.take_operations(self.x, self.taken)
        return [*taken, partial(setattr, self, "is_taken", False), *super()._additions(share)]

    def _forget(self, part: slice) -> None:
        super()._forget(part)
        self.taken[part].zero_()

    def _reset(self) -> None:
        super()._reset()
        self.is_taken = False
