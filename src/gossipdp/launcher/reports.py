"""Reports of a worker to the launcher that started it: the stage of its life, and all addresses.

From these reports a launcher knows live addresses, through which a restarted worker joins without
a store. Each worker has one end of a datagram socket pair of its own, named by GOSSIPDP_REPORT;
without a launcher, reports go nowhere. Nothing here waits: a report that does not fit the socket's
queue is dropped, and a later one follows.
"""

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

import msgspec

from gossipdp.errors import PeerLostError, RefusedError, RendezvousError

REPORT_VARIABLE = "GOSSIPDP_REPORT"
MAX_REPORT_BYTES = 1 << 16
# A joiner needs only one live address; this many fit one datagram.
MAX_ADDRESSES = 256


class Report(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message of a worker; a field that is None says nothing.

    Attributes:
        begins: the worker has met the others and trains.
        trains: it has made its first gradient step.
        rank: the rank that a joining worker was given.
        addresses: (host, port) by rank of the workers that it thinks alive.
        run_id, secret: those of the run's first model, unless the launcher chose them.
        consolidated: the worker holds the average at the end of the run.
        saves: True if it takes a last checkpoint when it is asked to end, and every second while it
            does; False once it no longer does.
        saved: the step and the directory of that checkpoint, once it is whole.
        checkpoints: the directory of the run's, and whether a start of all goes on from there.
        unsaved: the reason why a last checkpoint could not be saved.
        says: a sentence for the user.
    """

    begins: bool | None = None
    trains: bool | None = None
    rank: int | None = None
    addresses: dict[int, tuple[str, int]] | None = None
    run_id: str | None = None
    secret: str | None = None
    consolidated: bool | None = None
    saves: bool | None = None
    saved: tuple[int, str] | None = None
    checkpoints: tuple[str, bool] | None = None
    unsaved: str | None = None
    says: str | None = None


def send_report(report: Report, variables: Mapping[str, str] = os.environ) -> bool:
    """Send a report to this worker's launcher, and return whether it was taken."""
    descriptor, _, inode = variables.get(REPORT_VARIABLE, "").partition(":")
    if not descriptor.isdigit():
        return False
    if report.addresses is not None and len(report.addresses) > MAX_ADDRESSES:
        kept = dict(sorted(report.addresses.items())[:MAX_ADDRESSES])
        report = msgspec.structs.replace(report, addresses=kept)
    with suppress(OSError, ValueError, OverflowError):  # no number of a file
        # If a program that the worker started calls this, the number may name another file.
        if str(os.fstat(int(descriptor)).st_ino) != inode:
            return False
        with socket.socket(fileno=os.dup(int(descriptor))) as copy:
            copy.send(msgspec.json.encode(report), socket.MSG_DONTWAIT)
        return True
    return False


def say_instead_of_traceback() -> None:
    """Let the launcher print why a worker cannot take part, in place of a traceback of each.

    It prints an error of that kind that the script does not catch. Without a launcher Python shows
    the traceback. Nothing is shown of a SystemExit, which comes here from Python 3.14 on if it is a
    KeyboardInterrupt too. An excepthook of the user's own stays.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _say


def _say(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    is_of_run = issubclass(kind, (PeerLostError, RefusedError, RendezvousError))
    is_said = is_of_run and send_report(Report(says=str(value)))
    if not is_said and not issubclass(kind, SystemExit):
        sys.__excepthook__(kind, value, trace)


def report_variables(sender: socket.socket) -> dict[str, str]:
    """Return the variable by which a worker that inherits ``sender`` reports through it."""
    number = sender.fileno()
    return {REPORT_VARIABLE: f"{number}:{os.fstat(number).st_ino}"}


class ReportChannel:
    """A launcher's receiving end, and the sending end until the worker has it."""

    def __init__(self) -> None:
        self.receiver, self.sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.receiver.setblocking(False)

    def take(self) -> list[Report]:
        """Return the reports that have arrived, without those that do not parse. Never block."""
        reports = []
        with suppress(OSError):  # nothing more, or closed
            while data := self.receiver.recv(MAX_REPORT_BYTES):
                with suppress(msgspec.MsgspecError):
                    reports.append(msgspec.json.decode(data, type=Report))
        return reports

    def close(self) -> None:
        """Close both ends here; the worker's own stays open."""
        self.receiver.close()
        self.sender.close()
