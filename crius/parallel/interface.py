"""Which network interface Gloo binds: left alone it takes the address of the host's name, which may be 127.0.1.1."""

import contextlib
import fcntl
import socket
import struct
import sys
from collections.abc import Mapping, MutableMapping

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def choose_interface(environ: MutableMapping[str, str], master: str | None) -> str:
    """Set ``GLOO_SOCKET_IFNAME`` where it is open, and name the interface with the reason; both may be empty.

    Args:
        environ: of this process.
        master: host name or address of rank 0; None where all ranks are on this host, which then need no network.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    if master is None:
        environ.setdefault(NCCL, loopback)
    if environ.get(GLOO):
        return f"{environ[GLOO]} ({GLOO})"
    if master is None:
        environ[GLOO] = loopback
        return f"{loopback} (one host)"
    name, reason = _as_nccl(environ), NCCL
    if not name:
        name, reason = _towards(master), f"the route to {master}"
    if not name:
        return ""
    environ[GLOO] = name
    return f"{name} ({reason})"


def _as_nccl(environ: Mapping[str, str]) -> str:
    """The first interface that ``NCCL_SOCKET_IFNAME`` names, by the beginning of its name, or whole after ``=``."""
    asked = environ.get(NCCL, "")
    if not asked or asked.startswith("^"):
        return ""
    names = [name for _, name in socket.if_nameindex()]
    is_whole = asked.startswith("=")
    for word in asked.removeprefix("=").split(","):
        for name in names:
            if (name == word or (name.startswith(word) and not is_whole)) and _address(name):
                return name
    return ""


_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): packets to it would take the default route."""


def _towards(host: str) -> str:
    """The interface from which packets to ``host`` leave; empty where that cannot be told, which leaves it to Gloo.

    The name of this very host may lead to its loopback, where no other host can reach it: then the default route
    counts.
    """
    source = _source(host)
    if source is not None and source.startswith("127."):
        source = _source(_ELSEWHERE)
    return next((name for _, name in socket.if_nameindex() if source and _address(name) == source), "")


def _source(host: str) -> str | None:
    """The address from which this host would write to ``host``; None where there is no way to it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # of UDP: nothing is sent
        source: str = probe.getsockname()[0]
        return source
    return None


def _address(interface: str) -> str:
    """IPv4 address of an interface; empty where it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return ""
