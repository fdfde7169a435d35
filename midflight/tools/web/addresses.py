"""Which hosts a tool may speak to: public ones, checked by the addresses they resolve to.

Invariant: a connection is made to an address that was checked, never to a name that could resolve anew. What is no
public unicast address is refused in every spelling, since spellings end at the resolver (`0x7f.1`, `2130706433`,
`0177.0.0.1`, full-width digits) and what an IPv6 address embeds is taken out of it (mapped, NAT64, ISATAP).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Address

from midflight.tools.base import ToolError, TransientError
from midflight.tools.threads import Threads

Resolve = Callable[[str, int], Awaitable[list[str]]]

_V4 = tuple(ipaddress.IPv4Network(net) for net in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32"))
"""Beside what `is_global` leaves out: protocol assignments, the 6to4 relay, a cloud's metadata and wire server."""
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_V6 = tuple(ipaddress.IPv6Network(net) for net in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
"""Within it: protocol assignments with Teredo, documentation, 6to4."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
_LOOK_UPS = Threads("name look-up", 256)
"""A look-up cannot be stopped: one that nobody answers goes on after its call has ended, and must hold up no other."""
_NO_NAME = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}
"""What a resolver says of a name that it knows not to be there; others may be its own trouble."""


class Refused(ToolError):
    """An address that no tool may speak to."""


def is_public(address: str, *, loopback: bool = False) -> bool:
    """Whether an IP address is public unicast; with `loopback`, for tests, 127.0.0.0/8 and ::1 are as well."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, IPv6Address) and (ip.ipv4_mapped is not None or ip in _NAT64):
        return is_public(str(_last(ip)), loopback=loopback)
    if loopback and ip.is_loopback:
        return True
    if isinstance(ip, IPv6Address):
        outer = ip in _PUBLIC_V6 and ip.is_global and not any(ip in network for network in _V6)
        isatap = (int(ip) >> 32) & 0xFFFFFFFF in _ISATAP  # its prefix is routed as any other
        return outer and (not isatap or is_public(str(_last(ip)), loopback=loopback))
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _V4)


def _last(ip: IPv6Address) -> IPv4Address:
    """The IPv4 address in the last 32 bits."""
    return IPv4Address(int(ip) & 0xFFFFFFFF)


async def system_resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system's resolver gives them, each once.

    Raises:
        OSError: there are none.
    """
    found = await _LOOK_UPS.run(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def checked_addresses(host: str, port: int, *, loopback: bool, resolve: Resolve = system_resolve) -> list[str]:
    """The addresses to connect to.

    Raises:
        Refused: any of them is not public.
        ToolError: there is no such name, and will be none.
        TransientError: the name cannot be resolved for now.
    """
    try:
        addresses = await resolve(host, port)
    except (OSError, UnicodeError) as error:
        said = f"{host}: no such host ({error})"
        if isinstance(error, UnicodeError) or error.errno in _NO_NAME:
            raise ToolError(said) from error
        raise TransientError(said, infrastructure=False) from error
    for address in addresses:
        if not is_public(address, loopback=loopback):
            raise Refused(f"{host}: {address} is no public address; only public hosts can be read")
    if not addresses:
        raise ToolError(f"{host}: no such host")
    return addresses
