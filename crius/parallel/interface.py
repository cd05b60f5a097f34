"""The network interface for Gloo. Gloo's default is the address of the host's name, which may be 127.0.1.1."""

import contextlib
import fcntl
import socket
import struct
import sys
from collections.abc import Mapping, MutableMapping

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def choose_interface(environ: MutableMapping[str, str], master: str | None) -> str:
    """Set ``GLOO_SOCKET_IFNAME`` if it is unset. Returns the interface and the reason, or an empty text.

    Args:
        environ: environment of this process.
        master: host name or address of rank 0; None: all ranks are on this host and need no network.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    if master is None:
        environ.setdefault(NCCL, loopback)
    if environ.get(GLOO):
        return f"{environ[GLOO]} ({GLOO})"
    if master is None:
        environ[GLOO] = loopback
        return f"{loopback} (one host)"
    name = _as_nccl(environ)
    reason = NCCL
    if not name:
        name = _towards(master)
        reason = f"the route to {master}"
    if not name:
        return ""
    environ[GLOO] = name
    return f"{name} ({reason})"


def _as_nccl(environ: Mapping[str, str]) -> str:
    """The first interface that ``NCCL_SOCKET_IFNAME`` names: by a prefix, or after ``=`` by the full name."""
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
    """The interface that packets to ``host`` leave from; empty if unknown, which leaves the choice to Gloo.

    The name of this host may resolve to its loopback, which other hosts cannot reach. Then the default route is used.
    """
    source = _source(host)
    if source is not None and source.startswith("127."):
        source = _source(_ELSEWHERE)
    return next((name for _, name in socket.if_nameindex() if source and _address(name) == source), "")


def _source(host: str) -> str | None:
    """The address that this host would send from to ``host``; None if there is no route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # UDP: nothing is sent
        source: str = probe.getsockname()[0]
        return source
    return None


def _address(interface: str) -> str:
    """IPv4 address of an interface; empty if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return ""
