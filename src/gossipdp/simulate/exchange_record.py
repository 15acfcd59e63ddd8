"""What a simulated network remembers of each exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

from gossipdp.protocol.messages import ExchangeId


@dataclass(slots=True)
class End:
    """One end of an exchange: when it began and ended here, and how."""

    began: float
    alpha_tilde: float
    ended: float | None = None
    outcome: str = "running"


@dataclass(slots=True)
class ExchangeRecord:
    """An exchange as its two ends saw it."""

    id: ExchangeId
    transfer_s: float
    ends: dict[int, End] = field(default_factory=dict)

    @property
    def peers(self) -> frozenset[int]:
        """The ranks that began it."""
        return frozenset(self.ends)

    @property
    def is_complete(self) -> bool:
        """Whether both ends finished it."""
        return [end.outcome for end in self.ends.values()] == ["finished", "finished"]
