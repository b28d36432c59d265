"""Everything that is known about a method on a network before it is called: its price, its scope, and how it may be sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from proxy.chains.families import family_of
from proxy.chains.family import Family, Method, MethodTable
from proxy.chains.registry import Network
from proxy.core import access
from proxy.core.data_bounds import DATA_INDEX
from proxy.core.directives import Directives
from proxy.core.fixed_replies import FixedReplies
from proxy.core.jsonrpc import COMPACT, ID_STARTS, MAX_DEPTH, AnyEnvelope, repeats_members, request_tail
from proxy.core.nesting import is_deeper
from proxy.core.request_records import MOST_NAME
from proxy.core.routing_rules import RoutingRule
from proxy.core.verification import Verification
from proxy.telemetry import Tally

_SCOPES = {
    "read": access.SCOPE_BIT["rpc:read"],
    "filter": access.SCOPE_BIT["rpc:read"],
    "subscription": access.SCOPE_BIT["rpc:read"],
    "write": access.SCOPE_BIT["rpc:write"],
}
# A key without any of these may not call any method.
ANY_SCOPE = _SCOPES["read"] | _SCOPES["write"]
# JSON-RPC ids longer than this take the long path, which checks their length.
LONGEST_SHORT_ID: Final = 64
_ARRAY: Final = ord("[")
_ID_STARTS: Final = ID_STARTS
_COMPACT: Final[int] = COMPACT
# Characters that would change a line of the log.
_UNPRINTABLE: Final = re.compile(r'[^\x21-\x7e]|["\\]')
# No params begin with a zero byte.
_NO_SHAPE = (0, 0, b"")


def _latest_shape(method: Method, tag: bytes) -> tuple[int, int, bytes]:
    """How callers usually write the params of a call at the latest block: the first byte of the first item, a separator (one
    byte), and everything from its first occurrence on.

    Params of this shape have the tag as their last item, in the place where the method expects it. That matters: given several
    blocks, an upstream may read the first one, and the last would only make the call cheap.
    """
    if not tag:
        return _NO_SHAPE
    if method.after_object:
        return ord("{"), ord("}"), b'},"%b"]' % tag
    separator = b"[" if method.block_at == 0 else b","
    return ord('"'), ord(separator), b'%b"%b"]' % (separator, tag)


def _scope_of(method: Method) -> int:
    """The scopes that allow the method, as bits: a key needs one of them."""
    scope = 0
    for name in method.scopes:
        scope |= access.SCOPE_BIT[name]
    return scope or _SCOPES[method.kind]


class MethodPolicy:
    """One method on one network."""

    __slots__ = (
        "about_write",
        "answer",
        "any_block",
        "by_range",
        "cacheable",
        "data",
        "data_kind",
        "ends_latest",
        "family",
        "fixed",
        "has_block",
        "is_checked",
        "is_comparable",
        "is_head_number",
        "is_observed",
        "is_plain",
        "latest",
        "looks_up_null",
        "may_repeat",
        "may_show_head",
        "method",
        "most_asked",
        "normalises",
        "opens",
        "reports_block",
        "request_tail",
        "rules",
        "scope",
        "separator",
        "shared",
        "short",
        "shows_block",
        "tally",
        "units",
        "verify",
        "volatile",
    )

    def __init__(self, method: Method, family: Family, tally: Tally) -> None:
        self.method = method
        self.family = family
        # Members of results that comparisons leave out.
        self.volatile = family.volatile.union(method.volatile)
        self.units = method.price
        self.tally = tally
        self.scope = _scope_of(method)
        # The result of calls that are never sent to an upstream; empty for all others.
        self.answer = method.answer.encode()
        # The operator's replies to calls with given params.
        self.fixed: FixedReplies | None = None
        self.request_tail = request_tail(method.name)
        self.may_repeat = method.kind == "read" or method.page_token is not None
        # Whether replies may be cached or shared at all.
        rules = {method.cache, *(case.cache for case in method.cases)}
        self.cacheable = method.kind == "read" and rules != {"never"}
        self.has_block = method.block_at is not None
        # The kind of data that it reads at its block.
        self.data_kind = method.data_kind
        self.data = DATA_INDEX[method.data_kind]
        # The usual shape of params at the latest block. See `_latest_shape`.
        self.opens, self.separator, self.latest = _latest_shape(method, family.latest.encode())
        # The ends of params that name the latest block last, or no block; empty if the family has no such tag.
        self.ends_latest = (b'"%b"]' % family.latest.encode(), b"[]") if family.latest else ()
        # Whether two upstreams that are right reply the same: the result follows from the chain, and not from the moment.
        is_of_moment = method.private or method.fresh or method.cache in ("never", "head")
        self.is_comparable = self.may_repeat and not is_of_moment
        # Whether some of its calls must not take the short path. See `NetworkState.is_sampled`.
        self.is_observed = False
        # Whether replies are cached or shared on this route, and whether calls may take the short path. See `adapt`.
        self.shared = False
        self.short = False
        # Whether calls about any block may take the short path: all have the same price, and the cache is asked before an
        # upstream is chosen.
        self.any_block = False
        # Whether the params change neither price nor routing nor rights.
        self.is_plain = method.kind == "read" and method.block_at is None and not family.at_head
        self.by_range = method.splits
        # Whether upstream errors are translated to standard codes. Otherwise they are passed on unchanged.
        self.normalises = family.standard_errors
        self.is_head_number = method.head == "number"
        self.may_show_head = method.head != "none"
        # Whether results may name a block that this process has not seen. Such a result is read before it is passed on, however
        # large it is. Results that only `shows_block` covers are read if they are cached.
        self.reports_block = method.names_block
        self.shows_block = method.names_block or method.splits or method.head == "block"
        # Whether the upstream that has received a write of the caller is asked first. See `RecentWrites`.
        self.about_write = method.about != "none" or method.kind == "write"
        # Whether the route's guard checks the params, and whether a null result is looked up elsewhere.
        self.is_checked = False
        self.looks_up_null = False
        # How many upstreams are asked at the pending block; the highest of their results is the reply.
        self.most_asked = 1
        # How the operator wants replies to be verified.
        self.verify: Verification | None = None
        # The operator's rules that choose upstreams.
        self.rules: tuple[RoutingRule, ...] = ()

    def __repr__(self) -> str:
        return f"<MethodPolicy {self.method.name} {self.units} units>"

    def takes_highest(self, params: bytes, directives: Directives | None) -> bool:
        """Whether several upstreams are asked: each knows only the pending transactions that it has seen."""
        if self.most_asked < 2 or self.verify is not None:
            return False
        is_free = directives is None or not (directives.upstream or directives.verify)
        return is_free and self.family.block_ref(self.method, params).tag == "pending"

    def adapt(self, *, shares: bool, is_served: bool, is_observed: bool = False) -> None:
        """Decide whether replies are shared, and whether calls may take the short path. `shares`: whether the route shares
        replies at all. `is_served`: whether the route has one upstream alone, which serves the method.
        `is_observed`: whether others see some of the replies, which the short path does not keep."""
        self.shared = self.cacheable and shares
        is_simple = self.may_repeat and not (
            self.by_range
            or self.is_checked
            or self.answer
            or self.fixed
            or self.method.own
            or self.verify
            or self.rules
            or self.most_asked > 1
        )
        self.short = is_simple and (self.shared or is_served)
        self.is_observed = is_observed and self.is_comparable
        self.any_block = self.shared and self.method.history

    def look_up_null(self) -> None:
        """From now on, a null result is looked up elsewhere."""
        self.looks_up_null = True

    def is_short_call(self, envelope: AnyEnvelope, params: bytes, call_id: bytes, body: bytes) -> bool:
        """Whether a call may take the short path: it is certainly valid, and about the newest block, unless its block makes no
        difference. All others take the long path, which has all checks. `params` and `call_id` are those of the envelope, which
        was read from `body`."""
        return not (
            not params
            or params[0] != _ARRAY
            or not call_id
            or call_id[0] not in _ID_STARTS
            or len(call_id) > LONGEST_SHORT_ID
            or (self.has_block and not self.any_block and not self.names_latest(params) and not self.is_latest(params))
            or not body.isascii()
            or (
                len(body) - len(params) - len(call_id) - len(envelope.method) > _COMPACT
                and repeats_members(body, envelope)
            )
            or (len(params) > MAX_DEPTH and is_deeper(params, MAX_DEPTH))
        )

    def names_latest(self, params: bytes) -> bool:
        """Whether the params have the usual shape of a call at the latest block: a quick test, which most calls pass."""
        return (
            params[1] == self.opens
            and params.endswith(self.latest)
            and self.separator not in params[: len(params) - len(self.latest)]
        )

    def is_latest(self, params: bytes) -> bool:
        """Whether the call is about the latest block, named last or not at all."""
        if not params.endswith(self.ends_latest):
            return False
        return self.family.block_ref(self.method, params).tag == self.family.latest

    def last_block(self, params: bytes, head: int) -> int:
        """The last block of a range; the head if the family cannot tell."""
        last_block = self.family.last_block
        return head if last_block is None else last_block(params, head)

    def within_head(self, params: bytes, head: int) -> bytes:
        """Params that name no blocks far beyond the head, with the same result."""
        within_head = self.family.within_head
        return params if within_head is None else within_head(params, head)

    @property
    def may_broadcast(self) -> bool:
        """Whether the call may be sent to several upstreams: its params identify it, so that it is executed once."""
        return self.method.identified

    def already_known(self, params: bytes) -> bytes | None:
        """The result of a write that the upstream has received before."""
        return self.family.sent_id(params) if self.method.identified else None


def method_of(policy: MethodPolicy | None) -> str:
    """The name under which a call is counted, logged and recorded: that of its method, or `other` if there is no such method;
    empty if the call was refused before it was known."""
    return "" if policy is None else policy.tally.labels[1]


def invented_name_of(policy: MethodPolicy | None) -> str:
    """The name that a caller gave to a method that does not exist; empty for other calls. It may contain a key."""
    return "" if policy is None or policy.method.name == policy.tally.labels[1] else policy.method.name


def unknown_called(unknown: MethodPolicy, name: str) -> MethodPolicy:
    """The policy of a call to a method that does not exist, under the beginning of its name, which can be printed."""
    shown = _UNPRINTABLE.sub("?", name[:MOST_NAME])
    return MethodPolicy(Method(shown), unknown.family, unknown.tally)


def unknown_of(network: Network, tally: Callable[[str, str], Tally]) -> MethodPolicy:
    """The policy of all methods that do not exist. They share one tally, because callers can invent names."""
    return MethodPolicy(Method("other"), family_of(network), tally(network.id, "other"))


def policies_of(network: Network, methods: MethodTable, tally: Callable[[str, str], Tally]) -> dict[str, MethodPolicy]:
    family = family_of(network)
    return {
        name: MethodPolicy(method, family, tally(network.id, name))
        for name, method in methods.items()
        if not method.chains or network.chain.name in method.chains
    }
