"""What a worker tells the one who started it: that it trains, and where the others are now.

So whoever restarts a worker knows live addresses without a store. Each worker has an end of a
datagram socket pair of its own, named by GOSSIPDP_REPORT; where nobody listens, reports go nowhere.
Nothing here waits: a report that does not fit the socket's queue is dropped, a later one follows.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping

import msgspec

VARIABLE = "GOSSIPDP_REPORT"
MAX_REPORT_BYTES = 1 << 16
# A joiner needs one live address, and these fit one datagram.
MAX_ADDRESSES = 256


class Report(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message; what is None is not told.

    ``begins``: the worker has met the others and trains. ``rank``: the one that a joining worker
    was given. ``addresses``: (host, port) by rank of workers thought alive. ``run_id``, ``secret``:
    those of the run's first model, where the launcher did not choose them.
    """

    begins: bool | None = None
    rank: int | None = None
    addresses: dict[int, tuple[str, int]] | None = None
    run_id: str | None = None
    secret: str | None = None


def send_report(report: Report, variables: Mapping[str, str] = os.environ) -> bool:
    """Send it to whoever started this worker; whether it was taken."""
    descriptor, _, inode = variables.get(VARIABLE, "").partition(":")
    if not descriptor.isdigit():
        return False
    if report.addresses is not None and len(report.addresses) > MAX_ADDRESSES:
        kept = dict(sorted(report.addresses.items())[:MAX_ADDRESSES])
        report = msgspec.structs.replace(report, addresses=kept)
    try:
        # In a program that the worker started, the number may name something else.
        status = os.fstat(int(descriptor))
        if not stat.S_ISSOCK(status.st_mode) or str(status.st_ino) != inode:
            return False
        copy = socket.socket(fileno=os.dup(int(descriptor)))
        with copy:
            copy.send(msgspec.json.encode(report), socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


def report_variables(sender: socket.socket) -> dict[str, str]:
    """Tells a worker that has ``sender`` under the same descriptor to report through it."""
    number = sender.fileno()
    return {VARIABLE: f"{number}:{os.fstat(number).st_ino}"}


class ReportChannel:
    """The receiving end, and the sending one until the worker has it."""

    def __init__(self) -> None:
        self.receiver, self.sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.receiver.setblocking(False)

    def take(self) -> list[Report]:
        """The reports that have arrived; one that is none is skipped. Never blocks."""
        reports = []
        try:
            while data := self.receiver.recv(MAX_REPORT_BYTES):
                try:
                    reports.append(msgspec.json.decode(data, type=Report))
                except msgspec.MsgspecError:
                    continue
        except OSError:  # nothing more, or closed
            pass
        return reports

    def close(self) -> None:
        """Close both ends here; the worker's stays open."""
        self.receiver.close()
        self.sender.close()
