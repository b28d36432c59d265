"""Operators of upstreams. Votes count per operator, since the upstreams of one operator can fail, lie or be replaced together.

Settings name the operator. Without a name it is the domain of the URL's host: other subdomains, ports, paths and credentials do
not make another operator. All hosts that are not on the public internet are one operator. In doubt, two upstreams count as one
operator: one vote too few is an error, but one too many could verify a false reply.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

# The operator of unnamed upstreams on this machine and in private networks.
LOCAL = "local"
# Names that are not on the public internet (RFC 6761, RFC 6762, RFC 8375, ICANN's reservation of `internal`), and usual ones.
_PRIVATE = frozenset(("local", "localhost", "internal", "lan", "home", "corp", "intranet", "arpa", "test", "invalid"))
# Below a country these labels belong to registries: example.co.uk is a domain of its own, co.uk is not.
_REGISTRIES = frozenset(("ac", "co", "com", "edu", "gov", "net", "or", "org"))


def operator_of(host: str) -> str:
    """The operator of an upstream on this host, if the settings do not name one. The host is empty for a Unix socket."""
    try:
        address = ip_address(host)
    except ValueError:
        return _domain_of(host.rstrip("."))
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address) if address.is_global else LOCAL


def _domain_of(host: str) -> str:
    labels = host.lower().split(".")
    # The last label of an address in another form, such as 127.1 or 0x7f000001, is a number.
    if len(labels) == 1 or labels[-1] in _PRIVATE or labels[-1][0:1].isdigit():
        return LOCAL
    is_registry = len(labels[-1]) == 2 and labels[-2] in _REGISTRIES
    return ".".join(labels[-3:] if is_registry else labels[-2:])
