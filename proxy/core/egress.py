"""Which network addresses user-supplied URLs may lead to.

A token's URI and a webhook's URL are untrusted. They may only lead to the public internet: not to neighbouring hosts,
a cloud's metadata service, or an address that embeds another one. The table consists of the two IANA registries of
special-purpose addresses, and is stricter for ranges that have no legitimate use here. Python's `is_global` is not
used: in 3.11 it treats 192.0.0.192, 2002::/16, 64:ff9b::/96 and fec0::/10 as public.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

AddressBlock = IPv4Network | IPv6Network

_NEVER_V4 = tuple(
    IPv4Network(block)
    for block in (
        "0.0.0.0/8",  # this host: Linux treats it as loopback
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by a carrier's customers; some clouds keep their metadata here
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's own service to each of its machines, at an address that looks public
        "169.254.0.0/16",  # link-local: most clouds' metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; a cloud's metadata at .192
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
# All addresses that are assigned for the internet. Outside of it are loopback, IPv4 inside IPv6 in every form (mapped,
# compatible, NAT64), the local ranges old and new, and multicast.
_INTERNET_V6 = IPv6Network("2000::/3")
_NEVER_V6 = tuple(
    IPv6Network(block)
    for block in (
        "2001::/23",  # protocol assignments: Teredo has an IPv4 address inside
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: has an IPv4 address inside
        "3fff::/20",  # documentation
    )
)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in block for block in _NEVER_V4)
    return address in _INTERNET_V6 and not any(address in block for block in _NEVER_V6)


class EgressPolicy:
    """Addresses that the operator allows besides the public internet, and addresses denied in any case."""

    __slots__ = ("allow", "deny")

    def __init__(self, allow: Iterable[str] = (), deny: Iterable[str] = ()) -> None:
        self.allow: tuple[AddressBlock, ...] = tuple(map(ip_network, allow))
        self.deny: tuple[AddressBlock, ...] = tuple(map(ip_network, deny))

    def __repr__(self) -> str:
        return f"<EgressPolicy +{[*map(str, self.allow)]} -{[*map(str, self.deny)]}>"

    def may(self, text: str) -> bool:
        """Whether connections to this address are allowed. Anything but a plain address is refused: a zone is never public."""
        try:
            address = ip_address(text)
        except ValueError:
            return False
        if any(address in block for block in self.deny):
            return False
        return is_public(address) or any(address in block for block in self.allow)
