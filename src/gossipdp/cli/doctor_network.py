"""What ``gossipdp doctor`` says of the network: interfaces, the address chosen, ports, loopback.

Of each thing one function asks the machine, and one, which the tests give facts to, judges.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from gossipdp.cli.doctor_findings import Check, Finding
from gossipdp.errors import GossipError
from gossipdp.runtime.environment import Environment, show_address

_SIOCGIFADDR = 0x8915
"""<linux/sockios.h>: the IPv4 address of an interface."""

ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Kept for documentation (RFC 5737, RFC 3849), so on no network: where default routes lead."""


@dataclass(frozen=True)
class Interface:
    """A network interface that has an address."""

    name: str
    addresses: tuple[str, ...]
    mbits_per_s: int | None = None
    """What the interface says of its own speed; None: nothing."""


def checks() -> list[Check]:
    """All checks of this file, in the order in which they are shown."""
    found: list[Check] = [("address", _look_at_address), ("ports", _look_at_ports)]
    if sys.platform == "linux":  # the others tell of their interfaces in other ways
        found.insert(0, ("interfaces", _look_at_interfaces))
    return found


def judge_interfaces(found: list[Interface], outward: str | None) -> Finding:
    """The interfaces, and the address from which other machines are reached."""
    shown = []
    for interface in found:
        speed = f", {interface.mbits_per_s:,} Mbit/s" if interface.mbits_per_s else ""
        shown.append(f"{interface.name} {' '.join(interface.addresses)}{speed}")
    figures = {"interfaces": [asdict(interface) for interface in found], "outward": outward}
    text = "; ".join(shown) or "none has an address"
    if not any(_is_loopback(address) for each in found for address in each.addresses):
        advice = "bring loopback up (ip link set lo up): workers of one machine meet there"
        return Finding("interfaces", "fail", text, advice, figures)
    if outward is None:
        advice = "workers of this machine alone can train: no route leads to other machines"
        return Finding("interfaces", "warn", text, advice, figures)
    return Finding("interfaces", "ok", text, figures=figures)


def judge_address(
    chosen: str | None, error: str, is_given: bool, outward: str | None, num_nodes: int
) -> Finding:
    """The address on which a worker started here, with this environment, would listen.

    Args:
        chosen: it; None where there is none, for what ``error`` says.
        error: why not.
        is_given: GOSSIPDP_HOST or MASTER_ADDR has to do with it.
        outward: the address from which other machines are reached.
        num_nodes: machines that the run has, as far as the environment says.
    """
    figures = {"chosen": chosen, "outward": outward}
    if chosen is None:
        return Finding("address", "fail", error, "set GOSSIPDP_HOST, or MASTER_ADDR, aright")
    if num_nodes > 1 and _is_loopback(chosen):
        advice = f"set GOSSIPDP_HOST to {outward or 'an address that the others reach'}"
        found = f"{chosen}, which the other {num_nodes - 1} machines do not reach"
        return Finding("address", "warn", found, advice, figures)
    found = f"workers listen on {chosen}"
    advice = ""
    if not is_given:
        found += " (the default: one machine)"
        if outward is not None:
            advice = (
                f"for several machines: --nnodes and --rendezvous {show_address(outward, 29400)} "
                "on all, if this is the first"
            )
    return Finding("address", "ok", found, advice, figures)


def judge_ports(
    refused: dict[str, str], num_addresses: int, connects: bool, given_port: int, error: str
) -> Finding:
    """Whether workers can listen.

    Args:
        refused: addresses on which listening failed, and why.
        num_addresses: how many were tried.
        connects: a connection over loopback got through.
        given_port: GOSSIPDP_PORT, 0 for none.
        error: why nobody can listen on that.
    """
    figures = {"refused": refused, "tried": num_addresses, "given_port": given_port}
    if not connects:
        advice = "let this user make TCP sockets on 127.0.0.1 (sandbox or firewall?)"
        return Finding("ports", "fail", "no connection over loopback", advice, figures)
    if error:
        advice = "choose another GOSSIPDP_PORT, or unset it for any free port"
        return Finding("ports", "fail", error, advice, figures)
    if refused:
        shown = "; ".join(f"{address}: {why}" for address, why in refused.items())
        return Finding("ports", "warn", shown, "set GOSSIPDP_HOST to one of the others", figures)
    low, high = port_range() or (0, 0)
    port = f"from {given_port} on" if given_port else f"any free one ({low} to {high})"
    found = f"listening works on all {num_addresses} addresses; port {port}"
    advice = "" if given_port else "behind a firewall fix them: GOSSIPDP_PORT, one for each worker"
    return Finding("ports", "ok", found, advice, figures)


def interfaces() -> list[Interface]:
    """The interfaces that have an address, loopback first; on Linux."""
    sixes = _ipv6_addresses()
    found = []
    for _, name in socket.if_nameindex():
        addresses = [address for address in [_ipv4_address(name)] if address]
        addresses += sixes.get(name, [])
        if addresses:
            found.append(Interface(name, tuple(addresses), _speed(name)))
    return sorted(found, key=lambda each: not any(map(_is_loopback, each.addresses)))


def routed_address(target: str) -> str | None:
    """The address of this machine from which ``target`` is reached; None: no route leads there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; picks the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def outward_address() -> str | None:
    """The address from which other machines are reached, IPv4 before IPv6; None: there is none."""
    return next((own for target in ANYWHERE if (own := routed_address(target))), None)


def port_range() -> tuple[int, int] | None:
    """The first and the last port that the kernel gives where none was asked for."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return None
    return int(first), int(last)


def _look_at_interfaces() -> Finding:
    return judge_interfaces(interfaces(), outward_address())


def _look_at_address() -> Finding:
    nodes = os.environ.get("SLURM_JOB_NUM_NODES") or "1"
    num_nodes = int(nodes) if nodes.isdigit() else 1
    store_host = os.environ.get("MASTER_ADDR") or None
    host = os.environ.get("GOSSIPDP_HOST") or None
    chosen, error = None, ""
    try:
        chosen = Environment(store_host=store_host, host=host).choose_host()
    except GossipError as failed:
        error = str(failed)
    return judge_address(chosen, error, bool(store_host or host), outward_address(), num_nodes)


def _look_at_ports() -> Finding:
    from gossipdp.runtime.tcp_sockets import listen

    addresses = ["127.0.0.1"]
    if sys.platform == "linux":
        addresses = [address for each in interfaces() for address in each.addresses]
    refused = {}
    for address in addresses:
        try:
            listen(address, 0).close()
        except GossipError as error:
            refused[address] = str(error)
    given, error_text = os.environ.get("GOSSIPDP_PORT") or "0", ""
    try:
        given_port = int(given)
        if given_port:
            listen(os.environ.get("GOSSIPDP_HOST") or "127.0.0.1", given_port).close()
    except (ValueError, OverflowError):
        given_port, error_text = 0, f"GOSSIPDP_PORT is {given!r}; it must be a port from 1 to 65535"
    except GossipError as failed:
        error_text = str(failed)
    return judge_ports(refused, len(addresses), _connects(), given_port, error_text)


def _connects() -> bool:
    from gossipdp.runtime.tcp_sockets import listen

    try:
        with listen("127.0.0.1", 0) as listener:
            socket.create_connection(listener.getsockname(), 2.0).close()
    except (OSError, GossipError):
        return False
    return True


def _ipv4_address(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:  # it has none
            return None


def _ipv6_addresses() -> dict[str, list[str]]:
    """By interface; those of one link alone (fe80::) are left out, for they need a scope."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            found.setdefault(name, []).append(str(address))
    return found


def _speed(interface: str) -> int | None:
    try:
        speed = int(Path(f"/sys/class/net/{interface}/speed").read_text())
    except (OSError, ValueError):  # of a virtual one
        return None
    return speed if speed > 0 else None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
