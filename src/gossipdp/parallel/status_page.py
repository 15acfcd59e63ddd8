"""What a worker's status port shows, put together from what training keeps anyway."""

import ipaddress
import logging
import math
import os
import socket
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, SupportsFloat

from torch import Tensor

from gossipdp.launcher.environment import Environment, show_address
from gossipdp.links.clock import since_boot_s
from gossipdp.observe.server import Page, StatusServer
from gossipdp.observe.status import (
    METRICS_PATH,
    STATUS_PATH,
    NoticeStatus,
    WorkerStatus,
    encode_status,
)
from gossipdp.parallel.checkpointer import Checkpointer
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.options import Options
from gossipdp.parallel.run_logging import mean_loss

logger = logging.getLogger("gossipdp")

DEFAULT_HOST = "127.0.0.1"
MEAN_OF_LOSSES = 32
MAX_NOTICES = 20
MAX_LOGGED = 100


class StatusPage:
    """One worker's status port: what it shows, and the server that shows it.

    Training does three things for it, each a single assignment or append: it counts a step, leaves
    a loss as it is, and replaces values. Whatever costs more is done by the server's thread, when
    somebody asks.

    Args:
        host: where to listen.
        first_port: worker r listens on ``first_port`` + r; 0: on any free one.
    """

    def __init__(self, host: str, first_port: int) -> None:
        self._host = host
        self._first_port = first_port
        self._server: StatusServer | None = None
        self._pages: Mapping[str, Page] = {}
        self._losses: deque[SupportsFloat] = deque(maxlen=MEAN_OF_LOSSES)
        self._values: dict[str, float] = {}
        self._stepped_s: float | None = None

    @classmethod
    def wanted(cls, options: Options, environment: Environment) -> "StatusPage | None":
        """The page that the arguments, or else the variables, ask for."""
        monitor = options.monitor
        port = environment.status_port if monitor.status_port is None else monitor.status_port
        if port is None:
            return None
        return cls(monitor.status_host or environment.status_host or DEFAULT_HOST, port)

    def bind(self, rank: int) -> None:
        """Take the port of that rank; a worker that is given another rank moves.

        Raises:
            ValueError: there is no such port.
            RendezvousError: it is in use.
        """
        port = self._first_port + rank if self._first_port else 0
        if port > 65535:
            raise ValueError(
                f"status_port {self._first_port} is too high: worker {rank} would listen on "
                f"{port}, and 65535 is the last"
            )
        if self._server is not None:
            self._server.close()
        self._server = StatusServer(self._host, port)
        if self._pages:
            self._server.serve(self._pages)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        assert self._server is not None, "bind() comes first"
        return self._server.address

    def announced(self, host: str) -> tuple[str, int]:
        """What others are told; where it listens on all addresses, ``host`` stands for them."""
        bound, port = self.address
        return (host if ipaddress.ip_address(bound).is_unspecified else bound, port)

    def show(
        self,
        engine: Engine,
        checkpointer: Checkpointer,
        options: Options,
    ) -> None:
        """Answer from now on."""
        from gossipdp.observe.prometheus import CONTENT_TYPE, metrics_text

        assert self._server is not None, "bind() comes first"
        status = partial(self._status, engine, checkpointer, options)
        self._pages = {
            STATUS_PATH: Page("application/json", lambda: encode_status(status())),
            METRICS_PATH: Page(CONTENT_TYPE, lambda: metrics_text(status())),
        }
        self._server.serve(self._pages)
        where = show_address(*self.address)
        logger.info("worker %d shows its status at http://%s%s", engine.rank, where, STATUS_PATH)

    def close(self) -> None:
        """Show nothing any more. A second call does nothing."""
        if self._server is not None:
            self._server.close()

    # By the training loop.

    def stepped(self) -> None:
        """A gradient step ended."""
        self._stepped_s = since_boot_s()

    def log(self, loss: Tensor | float | None, values: Mapping[str, Any]) -> None:
        """Keep what ``one_loss`` and ``plain_values`` made of what the script logs, but no text."""
        if loss is not None:
            self._losses.append(loss)
        for name, value in values.items():
            is_new = name not in self._values
            if isinstance(value, int | float) and not (is_new and len(self._values) >= MAX_LOGGED):
                self._values[name] = float(value)

    # By the server's thread.

    def _logged(self) -> dict[str, float | None]:
        # Copied in one step, whatever the training loop does.
        losses, values = list(self._losses.copy()), self._values.copy()
        logged: dict[str, float | None] = {name: _known(value) for name, value in values.items()}
        if losses:
            logged["loss"] = _known(mean_loss(losses))
        return logged

    def _status(
        self,
        engine: Engine,
        checkpointer: Checkpointer,
        options: Options,
    ) -> WorkerStatus:
        stats, view, now_s = engine.stats(), engine.view(), since_boot_s()
        stepped_s = self._stepped_s
        return WorkerStatus(
            rank=engine.rank,
            incarnation=view.incarnation,
            num_workers=engine.world_size,
            run_id=view.run_id,
            method=options.method,
            graph=view.graph,
            comm_rate=options.comm_rate,
            host=socket.gethostname(),
            process_id=os.getpid(),
            state="averaging" if view.is_averaging else "training",
            gradient_steps=stats.gradient_steps,
            samples=stats.samples,
            run_samples=engine.total_samples(),
            budget_samples=options.budget_samples,
            step_seconds=_known(stats.step_seconds),
            since_step_s=None if stepped_s is None else now_s - stepped_s,
            logged=self._logged(),
            achieved_comm_rate=_known(stats.achieved_comm_rate),
            exchanges_initiated=stats.exchanges_initiated,
            exchanges_answered=stats.exchanges_answered,
            exchanges_failed=stats.exchanges_failed,
            exchange_seconds=stats.exchange_seconds,
            edge_distance=_known(stats.edge_distance),
            waited_seconds=stats.waited_seconds,
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            shared_bytes_sent=stats.shared_bytes_sent,
            shared_bytes_received=stats.shared_bytes_received,
            checkpoints=checkpointer.num_saved,
            checkpoints_failed=checkpointer.num_failed,
            members=view.members,
            neighbours=view.neighbours,
            notices=tuple(
                NoticeStatus(notice.rank, notice.kind, max(0.0, now_s - notice.at_s))
                for notice in stats.noticed[-MAX_NOTICES:]
            ),
        )


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
