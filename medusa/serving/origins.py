"""Which names a server answers to, and whose web pages: a browser would let any page reach what it can reach.

A page of another site may give its own name the address of this server (DNS rebinding), and is then of the
same origin for the browser. The ``Host`` that it sends is still that name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address

from medusa.serving.replies import RequestError

HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::[0-9]*)?")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def refusal_of_host(given: str, own_address: str, allowed: Collection[str]) -> RequestError | None:
    """What a client is told that asks for the host ``given``, as its header has it; None where it may.

    Args:
        own_address: on which the connection came in.
        allowed: names and addresses, beside that one and those of the loopback.
    """
    found = HOST.fullmatch(given)
    name = (found[1] or found[2] or "") if found else given
    address = _address(name)
    # A page cannot rebind an address, and "any" is what a server that listens everywhere calls itself.
    if is_loopback(name) or (address is not None and address.is_unspecified):
        return None
    if _normal(name) in map(_normal, (own_address, *allowed)):
        return None
    return RequestError(
        f"this server does not answer to the host {name[:200]!r}; whoever runs it may add --allowed-host",
        403,
        code="host_not_allowed",
    )


def refusal_of_origin(given: str, host: str, allowed: Collection[str]) -> RequestError | None:
    """What a page of the origin ``given`` is told; None where it is of this very ``host``, or ``allowed``."""
    origin = given.lower()
    if origin.partition("://")[2] == host.lower() or "*" in allowed or origin in allowed:
        return None
    return RequestError(
        f"pages of {given[:200]!r} may not ask this server; whoever runs it may add --cors-origin",
        403,
        code="origin_not_allowed",
    )


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _normal(host: str) -> str:
    return str(_address(host) or host.lower())
