"""The numbers of one worker: a single record, from the gossip thread to every page and log.

To add a metric, add a field to :class:`Counters` and set it where it is counted. ``stats()``, the
status, the log and Prometheus then show it, all under the field's name.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec

from gossipdp.protocol.actions import Notice

MAX_WORKERS = 4096
"""A reader of a log or of a status refuses ranks from here on: figures have a row a worker."""

Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORKERS)]
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Metric:
    """The description of a field: a ``counter`` only grows, a ``gauge`` does not; or a ``word``.

    The unit stands in the field's name. A field that holds a dictionary has one value for each key,
    and ``label`` says what the keys are.
    """

    help: str
    kind: Literal["counter", "gauge", "word"] = "counter"
    label: str = ""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's counts, measurements and notices at one moment. NaN means: not known yet.

    Attributes:
        rank: of this worker.
        world_size: workers in the run.
        at_s: the time of this record, by the clock of the notices.
        noticed: changes in the lives of others, and that this worker stood still itself; oldest
            first.
    """

    rank: Rank = 0
    world_size: int = 1
    at_s: float = 0.0
    noticed: tuple[Notice, ...] = ()
    gradient_steps: Annotated[int, Metric("Steps of the first optimizer.")] = 0
    samples: Annotated[int, Metric("Samples that this worker trained on.")] = 0
    step_seconds: Annotated[
        float, Metric("Running median of the duration of a gradient step.", "gauge")
    ] = math.nan
    exchanges_initiated: Annotated[
        int, Metric("Exchanges that this worker asked for and completed.")
    ] = 0
    exchanges_answered: Annotated[
        int, Metric("Exchanges that a neighbour asked for and this worker completed.")
    ] = 0
    exchanges_failed: Annotated[int, Metric("Exchanges that were stopped before their end.")] = 0
    exchanges_by_neighbour: Annotated[
        dict[Rank, int], Metric("Completed exchanges per neighbour.", label="neighbour")
    ] = {}
    wire_formats: Annotated[
        dict[Rank, str],
        Metric("Form of the last exchange with each neighbour.", "word", label="neighbour"),
    ] = {}
    achieved_comm_rate: Annotated[
        float, Metric("2 * exchanges_initiated / gradient_steps.", "gauge")
    ] = math.nan
    aimed_comm_rate: Annotated[
        float, Metric("Exchanges per gradient step that this worker aims at now.", "gauge")
    ] = math.nan
    comm_rate_bound: Annotated[
        str,
        Metric(
            "What keeps that from being higher: fixed (it was given), start, ceiling, link or "
            "processor.",
            "word",
        ),
    ] = "fixed"
    edge_distance: Annotated[
        float, Metric("Half the mean squared distance to the partner, last 16 exchanges.", "gauge")
    ] = math.nan
    exchange_seconds: Annotated[
        float, Metric("Time with an exchange under way, in the background.")
    ] = 0.0
    chunks_exchanged: Annotated[int, Metric("Chunks (1 to 4 MiB) in completed exchanges.")] = 0
    chunks_repeated: Annotated[int, Metric("Chunks sent again in bfloat16, in lattice8.")] = 0
    waited_seconds: Annotated[float, Metric("Time that training waited for others.")] = 0.0
    bytes_sent: Annotated[int, Metric("Bytes sent on all links, headers included.")] = 0
    bytes_received: Annotated[int, Metric("Bytes received on all links, headers included.")] = 0
    shared_bytes_sent: Annotated[
        int, Metric("Bytes of chunks that neighbours of this host read in place instead.")
    ] = 0
    shared_bytes_received: Annotated[
        int, Metric("Bytes of neighbours' chunks that this worker read in place.")
    ] = 0
    states_donated: Annotated[
        int, Metric("Optimizer states given to workers that joined or came back.")
    ] = 0
    checkpoints: Annotated[int, Metric("Checkpoints that this process wrote.")] = 0
    checkpoints_failed: Annotated[int, Metric("Checkpoints that could not be written.")] = 0
    checkpoint_pause_seconds: Annotated[
        float, Metric("Time that training waited while checkpoints were copied.")
    ] = 0.0

    @property
    def exchanges(self) -> int:
        """Return the number of completed exchanges, initiated or answered."""
        return self.exchanges_initiated + self.exchanges_answered

    @property
    def all_bytes_sent(self) -> int:
        """Return the bytes sent through sockets and through shared memory."""
        return self.bytes_sent + self.shared_bytes_sent


def decode(data: bytes, kind: type[_Record]) -> _Record:
    """Return the record in a JSON text, or raise ValueError. A null, as for NaN, is the default."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        known = {name: value for name, value in fields.items() if value is not None}
        return msgspec.convert(known, kind, str_keys=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


@functools.cache
def metrics_of(record: type) -> dict[str, Metric]:
    """Return the metrics among the fields of a record, by name."""
    return {
        name: metric
        for name, hint in get_type_hints(record, include_extras=True).items()
        for metric in getattr(hint, "__metadata__", ())
        if isinstance(metric, Metric)
    }
