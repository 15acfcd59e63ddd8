"""``gossipdp doctor``: what works on this machine, and how fast the link to another one is."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

import gossipdp
from gossipdp.cli.option_checks import check_output
from gossipdp.cli.run import read_secret

if TYPE_CHECKING:
    from rich.table import Table

    from gossipdp.cli.doctor_findings import Check, Finding
    from gossipdp.links.tls import Tls

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class DoctorArguments:
    """Say what works on this machine, how fast it is and what to set.

    With --listen on one machine and its HOST:PORT on another: measure the link between the two.
    """

    address: tyro.conf.Positional[str | None] = None
    """HOST:PORT of a gossipdp doctor --listen on another machine; measure the link to it alone."""

    listen: bool = False
    """Wait for a gossipdp doctor HOST:PORT on another machine, until Ctrl+C."""

    host: str | None = None
    """With --listen: the address of this machine to listen on; by default that of the interface
    that leads to other machines."""

    port: int = 0
    """With --listen: the port; 0 for any free one."""

    secret_file: Path | None = None
    """With --listen and with HOST:PORT: file with the secret that both ends must know; by default
    GOSSIPDP_SECRET, else --listen makes one and shows it."""

    json: Path | None = None
    """Also write the findings to this file."""


def run(arguments: DoctorArguments) -> int:
    """Look, show what was found and write the file; 1 if anything failed.

    Raises:
        ValueError: Options that do not belong together.
        RendezvousError: Nobody can listen on that address or port.
    """
    _check(arguments)
    if arguments.listen:
        _listen(arguments)
        return 0
    from rich.console import Console

    from gossipdp.cli import doctor_checks
    from gossipdp.cli.doctor_findings import examine

    checks = _link_checks(arguments) if arguments.address else doctor_checks.checks()
    console = Console()
    with Console(stderr=True).status("looking") as status:
        findings = examine(checks, lambda name: status.update(f"looking at: {name}"))
    console.print(table_of(findings))
    failed = [finding.name for finding in findings if finding.verdict == "fail"]
    warned = [finding.name for finding in findings if finding.verdict == "warn"]
    console.print(summary(failed, warned), highlight=False)
    if arguments.json is not None:
        report = {
            "ok": not failed,
            "version": gossipdp.__version__,
            "findings": [asdict(finding) for finding in findings],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        console.print(f"results: {arguments.json}", highlight=False, soft_wrap=True, markup=False)
    return 1 if failed else 0


def table_of(findings: Sequence[Finding]) -> Table:
    """The findings, advice under what it is about."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style="" if finding.verdict == "ok" else "bold")
        verdict = Text(finding.verdict, style=COLOURS[finding.verdict])
        table.add_row(verdict, finding.name, text)
    return table


def summary(failed: Sequence[str], warned: Sequence[str]) -> str:
    """All of it in a sentence."""
    if failed:
        return f"training does not work here before this is mended: {', '.join(failed)}"
    if warned:
        return f"training works here; see what is said of: {', '.join(warned)}"
    return "training works here"


def _check(arguments: DoctorArguments) -> None:
    if arguments.listen and arguments.address:
        raise ValueError(
            "--listen waits and HOST:PORT asks: give one of the two, each on its machine"
        )
    if not arguments.listen and (arguments.host or arguments.port):
        raise ValueError("--host and --port say where to listen; add --listen")
    if arguments.secret_file and not (arguments.listen or arguments.address):
        raise ValueError(
            "--secret-file is for a link between two machines; add --listen, or its HOST:PORT"
        )
    if not 0 <= arguments.port < 65536:
        raise ValueError(f"--port is {arguments.port}; it must be in 0..65535")
    check_output("--json", arguments.json)
    if arguments.listen and arguments.json is not None:
        raise ValueError("--listen finds nothing by itself; give --json on the other machine")


def _link_checks(arguments: DoctorArguments) -> list[Check]:
    from gossipdp.cli.doctor_checks import judge_link, routed_address
    from gossipdp.cli.doctor_findings import Finding
    from gossipdp.errors import GossipError
    from gossipdp.launcher.environment import read_addresses, show_address

    addresses = read_addresses("the address", arguments.address or "")
    if len(addresses) != 1:
        raise ValueError(f"the address is {arguments.address!r}; give one HOST:PORT")
    secret = read_secret(arguments.secret_file)
    if secret is None:
        raise ValueError(
            "the other end knows a secret: give it as GOSSIPDP_SECRET=... or --secret-file, as "
            "gossipdp doctor --listen shows it"
        )
    tls = _tls()
    ((name, port),) = addresses
    host = _numeric(name)

    def look() -> Finding:
        from gossipdp.cli.doctor_link import measure

        where = show_address(host, port)
        own = routed_address(host)
        if own is None:
            return Finding("link", "fail", f"no route leads to {host}", "check the network")
        try:
            return judge_link(measure((host, port), own, secret.encode(), tls=tls))
        except GossipError as error:
            return Finding("link", "fail", f"{where}: {error}", "mend that and try again")

    return [("link", look)]


def _listen(arguments: DoctorArguments) -> None:
    from gossipdp.cli.doctor_checks import outward_address
    from gossipdp.cli.doctor_link import serve
    from gossipdp.launcher.environment import show_address
    from gossipdp.links.sockets import listen

    host = arguments.host or outward_address()
    if host is None:
        raise ValueError("no interface leads to other machines; name an address with --host")
    secret = read_secret(arguments.secret_file)
    tls = _tls()
    listener = listen(host, arguments.port)
    bound, port = listener.getsockname()[:2]
    given = ""
    option = f" --secret-file {arguments.secret_file}" if arguments.secret_file else ""
    if secret is None:
        secret = secrets.token_hex(16)
        given = f"GOSSIPDP_SECRET={secret} "
    where = show_address(bound, port)
    _tell(f"listening; on the other machine run: {given}gossipdp doctor {where}{option}")
    own = bound if bound not in ("0.0.0.0", "::") else outward_address() or "127.0.0.1"
    serve(listener, own, secret.encode(), tls=tls, tell=_tell)


def _numeric(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, 9, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(f"the name {name!r} cannot be looked up ({error}); check it") from None


def _tls() -> Tls | None:
    from gossipdp.launcher.environment import tls_from
    from gossipdp.links.tls import Tls

    files = tls_from(os.environ)
    return Tls(files) if files else None


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
