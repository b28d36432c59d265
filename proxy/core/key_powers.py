"""The powers of a key, and whether they are within those of the person or key that grants them.

A key never gives more than it has: not to itself, nor to a key that it creates, changes or rotates, nor to a person whom it
invites. A person can give the scopes of the account's operations that the person's role allows.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.core import access, directives
from proxy.core.roles import PERMISSIONS, Permission, Role

# The permission that a person needs to give a scope of the account's operations to a key.
SCOPE_PERMISSIONS: dict[str, Permission] = {
    "usage:read": "view",
    "activity:read": "view",
    "keys:manage": "manage",
    "members:manage": "administer",
    "account:manage": "administer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPowers:
    """Empty lists and None mean that there is no limit."""

    live: bool = True
    scopes: int = access.ALL_SCOPES
    requests_per_second: int | None = None
    units_per_second: int | None = None
    expires_at: datetime.datetime | None = None
    ips: Sequence[str] = ()
    origins: Sequence[str] = ()
    networks: Collection[str] = ()
    methods: Collection[str] = ()
    contracts: Collection[str] = ()
    directives: Collection[str] = frozenset(directives.BY_NAME)
    # Whether transactions may go to the public mempool.
    sends_publicly: bool = True


def of_key(row: Mapping[str, Any]) -> KeyPowers:
    """The powers of a stored key."""
    return KeyPowers(
        live=row["mode"] == "live",
        scopes=access.scope_bits(row["scopes"]),
        requests_per_second=row["requests_per_second"],
        units_per_second=row["units_per_second"],
        expires_at=row["expires_at"],
        ips=row["allowed_ips"],
        origins=row["allowed_origins"],
        networks=row["allowed_networks"],
        methods=row["allowed_methods"],
        contracts=[each.lower() for each in row["allowed_contracts"]],
        directives=directives.allowed_to(row["directives"]),
        sends_publicly=not row["private_transactions"],
    )


def of_role(role: Role) -> KeyPowers:
    """The powers of a person with this role. One who manages the account has all of its keys."""
    names = [name for name, needed in SCOPE_PERMISSIONS.items() if needed in PERMISSIONS[role]]
    seen = access.USUAL_SCOPES if "manage" in PERMISSIONS[role] else ("requests:read",)
    return KeyPowers(scopes=access.scope_bits([*seen, *names]), directives=directives.USUAL)


def excess(holder: KeyPowers, other: KeyPowers) -> str:
    """The first field in which the other powers exceed those of the holder; empty if they are within them."""
    if other.live and not holder.live:
        return "mode"
    if other.scopes & ~holder.scopes:
        return "scopes"
    if other.sends_publicly and not holder.sends_publicly:
        return "private_transactions"
    for name in ("networks", "methods", "contracts"):
        if not _is_within(getattr(holder, name), getattr(other, name)):
            return f"allowed_{name}"
    if holder.ips and not (other.ips and all(_is_in_blocks(each, holder.ips) for each in other.ips)):
        return "allowed_ips"
    if holder.origins and not (other.origins and all(_is_in_origins(each, holder.origins) for each in other.origins)):
        return "allowed_origins"
    for name in ("requests_per_second", "units_per_second", "expires_at"):
        most, wanted = getattr(holder, name), getattr(other, name)
        if most is not None and (wanted is None or wanted > most):
            return name
    return "" if set(other.directives) <= set(holder.directives) else "directives"


def _is_within(allowed: Collection[str], wanted: Collection[str]) -> bool:
    return not allowed or (bool(wanted) and set(wanted) <= set(allowed))


def _is_in_blocks(text: str, blocks: Sequence[str]) -> bool:
    """Whether one of the blocks contains this one: its prefix is the other's own, shortened to the same length."""
    wanted = ipaddress.ip_network(text)
    for block in map(ipaddress.ip_network, blocks):
        if block.version != wanted.version or block.prefixlen > wanted.prefixlen:
            continue
        if wanted.supernet(new_prefix=block.prefixlen) == block:
            return True
    return False


def _is_in_origins(wanted: str, origins: Sequence[str]) -> bool:
    """Whether one of the origins is this one, or a pattern for it. `https://*.example.com` also covers `https://*.a.example.com`."""
    for allowed in origins:
        scheme, star, host = allowed.partition("*")
        if wanted == allowed or (star and wanted.startswith(scheme) and wanted.endswith(host)):
            return True
    return False
