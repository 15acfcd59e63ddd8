"""The seam between a part of the page and the page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import msgspec

Result = TypeVar("Result", bound=msgspec.Struct)


@dataclass(frozen=True)
class Effort:
    """How much to measure, and with what.

    Args:
        quick: tiny settings, to see that everything works; the page says so.
        num_processes: how many processes measure side by side; 1: none beside this one.
        show_progress: whether to draw progress bars, on standard error.
    """

    quick: bool = False
    num_processes: int = 1
    show_progress: bool = False

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ValueError(
                f"the number of processes is {self.num_processes}; it must be 1 or more"
            )


class Section(ABC, Generic[Result]):
    """One claim or table of the paper, or one of our own.

    What it measures is a msgspec structure, so that it can be stored and read back; figure and
    text are made from that structure alone.
    """

    name: ClassVar[str]
    """What ``--only`` calls it."""
    title: ClassVar[str]
    result_type: type[Result]

    @abstractmethod
    def measure(self, effort: Effort) -> Result:
        """Run the simulations."""

    @abstractmethod
    def draw(self, result: Result, path: Path) -> None:
        """Write the figure as a PNG."""

    @abstractmethod
    def write(self, result: Result) -> list[str]:
        """The section's paragraphs and tables in Markdown, :data:`FIGURE` where the figure goes."""


FIGURE = "<figure>"
