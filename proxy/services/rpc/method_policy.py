"""What is known of a method on a network before it is called: its price, its scope, and the ways that are open to it."""

from __future__ import annotations

from collections.abc import Callable

from proxy.chains import families
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

_ENDS_LATEST = (b'"latest"]', b"[]")
# The params of a call about the latest block, as callers mostly send them: the first byte of the first item, a byte, and all
# that follows the first such byte. So the block is known to be the last item and to stand where the method has it: of
# several blocks in a row an upstream may read the first, and the last would only make it cheap.
_FIRST = (ord('"'), b"[", b'"latest"]')
_SECOND = (ord('"'), b",", b'"latest"]')
_AFTER_AN_OBJECT = (ord("{"), b"}", b',"latest"]')


def _latest_shape(method: Method) -> tuple[int, bytes, bytes]:
    if method.name in families.TAKE_OBJECTS:
        return _AFTER_AN_OBJECT
    return _FIRST if method.block_at == 0 else _SECOND


class MethodPolicy:
    """One method on one network."""

    __slots__ = (
        "asks_on", "before_latest", "by_range", "family", "has_block", "is_checked", "is_head_number", "is_plain", "keeps",
        "latest", "may_repeat", "may_show_head", "method", "normalises", "opens", "request_tail", "scope", "shared",
        "short", "shows_block", "tally", "tells_block", "units", "units_line",
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
        self.opens, self.before_latest, self.latest = _latest_shape(method)
        # Whether replies are kept or shared on this route; and whether a call may take the short way. The route says so.
        self.shared = False
        self.short = False
        # Whether nothing about the params changes price, routing or rights: the fast way is open.
        self.is_plain = method.kind == "read" and method.block_at is None
        self.by_range = method.name in families.BY_RANGE
        # Errors of this family have codes of ours; others are passed on as they are.
        self.normalises = family.name == "evm"
        self.is_head_number = method.name in families.HEAD_NUMBERS
        self.may_show_head = self.is_head_number or method.name in families.HEAD_BLOCKS
        # Whether its result is read for a block that we may not have heard of, however large it is; or where it is kept anyway.
        self.tells_block = method.name in families.TELL_BLOCKS
        self.shows_block = self.tells_block or self.by_range or method.name in families.HEAD_BLOCKS
        # Whether the route's desk reads the params before they go out; and whether a null is asked about elsewhere.
        self.is_checked = False
        self.asks_on = False

    def __repr__(self) -> str:
        return f"<MethodPolicy {self.method.name} {self.units} units>"

    def is_latest(self, params: bytes) -> bool:
        """Whether the call is about the latest block, and says so last or not at all."""
        return params.endswith(_ENDS_LATEST) and self.family.block_ref(self.method, params).tag == "latest"

    @property
    def may_broadcast(self) -> bool:
        """Whether sending it to several is sending it once: its hash names it."""
        return self.method.name in families.HASH_OF_SENT

    def already_known(self, params: bytes) -> bytes | None:
        """The result of a send that the upstream has seen before."""
        tell = families.HASH_OF_SENT.get(self.method.name)
        return tell(params) if tell else None


def unknown_of(network: Network, tally: Callable[[str, str], Tally]) -> MethodPolicy:
    """Calls of methods that do not exist are counted as one: their names are the callers' to invent."""
    return MethodPolicy(Method("other"), families.FAMILIES[network.family], 0, tally(network.id, "other"))


def policies_of(network: Network, prices: UnitPrices, tally: Callable[[str, str], Tally]) -> dict[str, MethodPolicy]:
    family = families.FAMILIES[network.family]
    units = prices.of_family(network.family)
    return {
        name: MethodPolicy(method, family, units[name], tally(network.id, name))
        for name, method in family.methods.items()
    }
