"""A step's compute as a timed wait, in which this machine's cores compute the real gradients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor, nn

FORWARD_SHARE = 1 / 3
TICK_S, LONGEST_GAP_S = 0.004, 0.015


class TimedCompute:
    """The stand-in for an accelerator: real gradients that are there when a device would have them.

    A third of a step is forward and two thirds are backward, in equal parts a stage. This machine's
    cores compute the values within that time; a wait makes up the rest. So each stage's gradient is
    there at its time, and a method that sends it while the backward pass goes on gains what it
    would gain on a device.

    Args:
        stages: modules of which each takes in what the one before gave out. A stage that holds
            others, such as the whole model, takes the part of what comes after those.
        draw_s: how long the next step takes.
        clock: seconds, for the device; see :class:`RunningClock`.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        draw_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._draw_s, self._clock = draw_s, clock
        self._began_s = self._duration_s = 0.0
        for number, stage in enumerate(stages):
            self._pace(stage, number / len(stages), (number + 1) / len(stages))

    def _pace(self, stage: nn.Module, before: float, until: float) -> None:
        """Let a stage last from one share of the model's depth to another, there and back."""

        def forward(module: nn.Module, inputs: object, output: Tensor) -> None:
            self.wait(FORWARD_SHARE * until)
            if output.requires_grad:
                output.register_hook(backward)

        def backward(gradient: Tensor) -> None:
            self.wait(FORWARD_SHARE + (1 - FORWARD_SHARE) * (1 - before))

        stage.register_forward_hook(forward)

    def begin(self) -> None:
        self._began_s, self._duration_s = self._clock(), self._draw_s()

    def wait(self, share: float) -> None:
        """Wait until this share of the step is over; return at once where it is already."""
        until_s = self._began_s + share * self._duration_s
        while (left_s := until_s - self._clock()) > 0:
            time.sleep(left_s)


class RunningClock:
    """The seconds in which this process was let run: it stands still while SIGSTOP lasts.

    A device stands still with its machine. A thread looks at the clock every 4 ms; if nobody has
    looked for 15 ms, the process was stopped, or the machine did not let it run. Shorter stops go
    unseen.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._last_s, self._stood_s = clock(), 0.0

    def start(self) -> RunningClock:
        """Look at the clock from a thread, as long as the process lives."""
        threading.Thread(target=self._look, name="running clock", daemon=True).start()
        return self

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            gap_s = now - self._last_s
            if gap_s > LONGEST_GAP_S:
                self._stood_s += gap_s - TICK_S / 2  # the stop began within a tick, at any time
            self._last_s = now
            return now - self._stood_s

    def _look(self) -> None:
        while True:
            time.sleep(TICK_S)
            self()
