"""What is known of a method on a network before it is called: its price, its scope, and the ways that are open to it."""

from __future__ import annotations

from collections.abc import Callable

from proxy.chains.families import family_of
from proxy.chains.family import Family, Method
from proxy.chains.registry import Network
from proxy.core import access
from proxy.core.jsonrpc import request_tail
from proxy.core.pricing import UnitPrices
from proxy.telemetry import Tally

_SCOPES = {
    "read": access.SCOPE_BIT["rpc:read"],
    "filter": access.SCOPE_BIT["rpc:read"],
    "subscription": access.SCOPE_BIT["rpc:read"],
    "write": access.SCOPE_BIT["rpc:write"],
}
# A key with neither has no business here, whatever the method.
ANY_SCOPE = _SCOPES["read"] | _SCOPES["write"]

# The params of a call about the latest block, as callers mostly send them: the first byte of the first item, a byte, and all
# that follows the first such byte. So the block is known to be the last item and to stand where the method has it: of
# several blocks in a row an upstream may read the first, and the last would only make it cheap.
# No params begin with a zero byte.
_NO_SHAPE = (0, b"", b"")


def _latest_shape(method: Method, tag: bytes) -> tuple[int, bytes, bytes]:
    if not tag:
        return _NO_SHAPE
    if method.after_object:
        return ord("{"), b"}", b',"%b"]' % tag
    return ord('"'), b"[" if method.block_at == 0 else b",", b'"%b"]' % tag


class MethodPolicy:
    """One method on one network."""

    __slots__ = (
        "asks_on", "before_latest", "by_range", "ends_latest", "family", "has_block", "is_checked", "is_head_number",
        "is_plain", "keeps", "latest", "may_repeat", "may_show_head", "method", "normalises", "opens", "request_tail",
        "scope", "shared", "short", "shows_block", "tally", "tells_block", "units", "units_line",
    )  # fmt: skip

    def __init__(self, method: Method, family: Family, units: int, tally: Tally, *, scope: int = 0) -> None:
        self.method = method
        self.family = family
        self.units = units
        self.tally = tally
        self.scope = scope or _SCOPES[method.kind]
        self.request_tail = request_tail(method.name)
        self.may_repeat = method.kind == "read"
        # Whether replies may be kept or shared at all.
        self.keeps = method.kind == "read" and method.cache != "never"
        self.units_line = b"X-Compute-Units: %d\r\n" % units
        self.has_block = method.block_at is not None
        # How the usual params of a call about `latest` begin, and what follows what in them: see `_latest_shape`.
        self.opens, self.before_latest, self.latest = _latest_shape(method, family.latest.encode())
        # How params end that name the latest block last or no block at all; empty if the family has no such tag.
        self.ends_latest = (b'"%b"]' % family.latest.encode(), b"[]") if family.latest else ()
        # Whether replies are kept or shared on this route; and whether a call may take the short way. The route says so.
        self.shared = False
        self.short = False
        # Whether nothing about the params changes price, routing or rights: the fast way is open.
        self.is_plain = method.kind == "read" and method.block_at is None
        self.by_range = method.splits
        # Errors of this family have codes of ours; others are passed on as they are.
        self.normalises = family.standard_errors
        self.is_head_number = method.head == "number"
        self.may_show_head = method.head != "none"
        # Whether its result is read for a block that we may not have heard of, however large it is; or where it is kept anyway.
        self.tells_block = method.names_block
        self.shows_block = method.names_block or method.splits or method.head == "block"
        # Whether the route's desk reads the params before they go out; and whether a null is asked about elsewhere.
        self.is_checked = False
        self.asks_on = False

    def __repr__(self) -> str:
        return f"<MethodPolicy {self.method.name} {self.units} units>"

    def is_latest(self, params: bytes) -> bool:
        """Whether the call is about the latest block, and says so last or not at all."""
        if not params.endswith(self.ends_latest):
            return False
        return self.family.block_ref(self.method, params).tag == self.family.latest

    def last_block(self, params: bytes, head: int) -> int:
        """The last block of a range; the head if the family cannot tell."""
        last_block = self.family.last_block
        return head if last_block is None else last_block(params, head)

    @property
    def may_broadcast(self) -> bool:
        """Whether sending it to several is sending it once: its hash names it."""
        return self.method.sent_id is not None

    def already_known(self, params: bytes) -> bytes | None:
        """The result of a send that the upstream has seen before."""
        sent_id = self.method.sent_id
        return None if sent_id is None else sent_id(params)


def unknown_of(network: Network, tally: Callable[[str, str], Tally]) -> MethodPolicy:
    """Calls of methods that do not exist are counted as one: their names are the callers' to invent."""
    return MethodPolicy(Method("other"), family_of(network), 0, tally(network.id, "other"))


def policies_of(network: Network, prices: UnitPrices, tally: Callable[[str, str], Tally]) -> dict[str, MethodPolicy]:
    family = family_of(network)
    units = prices.of_family(network.family)
    return {
        name: MethodPolicy(method, family, units[name], tally(network.id, name))
        for name, method in family.methods.items()
    }
