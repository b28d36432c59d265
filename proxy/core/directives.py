"""Directives: headers or query parameters with which a request controls how it is served.

The table `DIRECTIVES` decides which values are valid, which keys may use a directive, and what the documentation says. A
request without directives has None, so it costs nothing extra; all others have one immutable `Directives`, read once and passed
along with the call.

A directive's name is its query parameter and its permission in a key's settings. Its header has the same words: `timeout_ms` is
`X-Timeout-Ms`. Each may be given once, in either form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from proxy.core import verification
from proxy.core.access import has_key
from proxy.core.credits import NANOS_PER_USD
from proxy.core.fault_plans import FaultPlan, plan_of
from proxy.core.verification import Verification
from proxy.errors import Fault, Forbidden, InvalidRequest

# Characters of a wrong value that an error repeats.
MAX_ECHO = 40
LONGEST_TIMEOUT_MS = 300_000
LONGEST_STALE_S = 600
MOST_RETRIES = 2
LONGEST_FALLBACK = 1000
USUAL_BLOCK_WAIT_S, LONGEST_BLOCK_WAIT_S = 2.0, 10.0
# The largest block number that the database and the memory shared by workers hold.
HIGHEST_BLOCK = (1 << 63) - 1
_DIGITS = re.compile(r"[0-9]{1,19}", re.ASCII)
_HEX = re.compile(r"0x[0-9a-fA-F]{1,16}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3})?", re.ASCII)
_AMOUNT = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,9})?", re.ASCII)
_LABEL = re.compile(r"[!-~](?:[ -~]{0,62}[!-~])?", re.ASCII)


class AttemptTrace(Protocol):
    """Records the attempts of sampled calls (`proxy/tracing.py`). `call` is the id of a call."""

    def began(self, call: bytes, upstream: str, method: str) -> bytes:
        """An attempt begins. Returns a header for the upstream."""

    def failed(self, call: bytes, upstream: str, reason: str) -> None: ...
    def ended(self, call: bytes, upstream: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Directives:
    """The directives of one request. Each default means that the request does not have it."""

    # Do not read the cache: Cache-Control: no-cache.
    fresh: bool = False
    # The label of the only upstream to use.
    upstream: str = ""
    timeout_ms: int = 0
    # How many seconds ago a cached reply may have become out of date.
    max_stale: int = 0
    # The reply must come from the state at this block or a later one; and how many seconds to wait for that block.
    min_block: int = 0
    min_block_wait: float = USUAL_BLOCK_WAIT_S
    # Faults to inject into the reply, for tests of clients.
    fault: FaultPlan | None = None
    # Record what happens to the request.
    explain: int = 0
    # Show what the call cost at the upstreams' providers.
    cost: int = 0
    # The most that the call may cost at an upstream's provider, in billionths of a dollar; negative without a limit.
    max_cost: int = -1
    # Add a member to replies on a WebSocket that has what replies over HTTP have as headers.
    meta: int = 0
    # How many more attempts may follow the first one.
    retry: int = MOST_RETRIES
    verify: Verification | None = None
    # Send transactions to relays only, and after how many blocks to the public mempool too; 0: never.
    private: int = 0
    private_fallback: int = 0
    # Set for sampled requests. It changes nothing about how they are served.
    trace: AttemptTrace | None = None

    @property
    def reads_cache(self) -> bool:
        return not self.fresh and not self.upstream and self.verify is None

    @property
    def may_join(self) -> bool:
        """Whether the call may share an attempt with equal calls of others, which have their own deadlines and retries."""
        is_patient = not self.timeout_ms and self.retry == MOST_RETRIES
        return is_patient and self.reads_cache and not self.min_block

    @property
    def price_factor(self) -> int:
        """The factor on the price of the method: a verified call makes several calls to upstreams."""
        return 1 if self.verify is None else self.verify.price_factor

    @property
    def steers(self) -> bool:
        """Whether the call cannot be sent to its upstream together with others."""
        limits = self.timeout_ms or self.min_block or self.retry < MOST_RETRIES or self.max_cost >= 0
        return bool(self.upstream or limits or self.verify)


FRESH = Directives(fresh=True)
NO_DIRECTIVES = Directives()


@dataclass(frozen=True, slots=True)
class Directive:
    name: str
    # Reads a value; raises ValueError if it is not valid.
    read: Callable[[str], Any]
    # The valid values, for errors and the documentation.
    values: str
    about: str
    # Whether it is allowed for keys whose settings do not list directives.
    is_usual: bool = True

    @property
    def header(self) -> str:
        return f"X-{self.name.replace('_', '-').title()}"


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not _DIGITS.fullmatch(text) or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return read


def _seconds(most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        if not _SECONDS.fullmatch(text) or float(text) > most:
            raise ValueError
        return float(text)

    return read


def _dollars(text: str) -> int:
    """An amount of US dollars, in billionths."""
    if not _AMOUNT.fullmatch(text):
        raise ValueError
    return int(Decimal(text) * NANOS_PER_USD)


def _block(text: str) -> int:
    """A block number, in decimal or in the hex form of JSON-RPC."""
    number = int(text, 16) if _HEX.fullmatch(text) else _whole(0, HIGHEST_BLOCK)(text)
    if number > HIGHEST_BLOCK:
        raise ValueError
    return number


def _label(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise ValueError
    return text


DIRECTIVES = (
    Directive(
        "upstream",
        _label,
        "the name or a label of an upstream of the network",
        "Send the call only to this upstream, or to those with this label, past the cache. An operator grants it to a key.",
        is_usual=False,
    ),
    Directive(
        "timeout_ms",
        _whole(1, LONGEST_TIMEOUT_MS),
        f"a whole number from 1 to {LONGEST_TIMEOUT_MS}",
        "Give up with a 504 after this many milliseconds. The operator's own timeout still applies.",
    ),
    Directive(
        "max_stale",
        _whole(0, LONGEST_STALE_S),
        f"a whole number from 0 to {LONGEST_STALE_S}",
        "Accept a cached reply that a new block made out of date up to this many seconds ago.",
    ),
    Directive(
        "retry",
        _whole(0, MOST_RETRIES),
        f"a whole number from 0 to {MOST_RETRIES}",
        "Make at most this many attempts after the first. With 0, a failure or a slow upstream is not hidden by another one.",
    ),
    Directive(
        "min_block",
        _block,
        "a block number, in decimal or 0x-prefixed hex",
        "Answer from the state at this block or a later one, or with a 503 that has the newest block.",
    ),
    Directive(
        "min_block_wait",
        _seconds(LONGEST_BLOCK_WAIT_S),
        f"seconds, from 0 to {LONGEST_BLOCK_WAIT_S:g}",
        f"How long to wait for the block of X-Min-Block. Without it, {USUAL_BLOCK_WAIT_S:g} seconds.",
    ),
    Directive(
        "explain",
        _whole(0, 1),
        "0 or 1",
        "With 1, record what happens to the request. Read it at /requests/{id} with the id in X-Request-Id.",
    ),
    Directive(
        "cost",
        _whole(0, 1),
        "0 or 1",
        "With 1, the reply has X-Cost: what the call cost the operator at providers. An operator grants it to a key.",
        is_usual=False,
    ),
    Directive(
        "max_cost",
        _dollars,
        "US dollars, such as 0.00001",
        "Use only upstreams whose provider bills at most this much for the call. Own nodes and the cache cost nothing.",
    ),
    Directive(
        "meta",
        _whole(0, 1),
        "0 or 1",
        "On a WebSocket, with 1: replies have the member `meta` with what replies over HTTP have as headers.",
    ),
    Directive(
        "verify",
        verification.parse,
        verification.FORM,
        "Verify the reply before it is sent: upstreams of K of N operators agree on it, or the chain's hashes prove it.",
    ),
    Directive(
        "private",
        _whole(0, 1),
        "0 or 1",
        "With 1, send transactions to the network's private relays only, never to the public mempool.",
    ),
    Directive(
        "private_fallback",
        _whole(1, LONGEST_FALLBACK),
        f"a whole number from 1 to {LONGEST_FALLBACK}",
        "Send a private transaction to the public mempool if it is in no block after this many blocks. Without it, never.",
    ),
    Directive(
        "fault",
        plan_of,
        "parts such as latency=800ms, status=503, p=0.2",
        "Spoil the reply as described under Faults. Only for test keys.",
    ),
)
BY_NAME: Mapping[str, Directive] = {directive.name: directive for directive in DIRECTIVES}
BY_HEADER: Mapping[str, Directive] = {directive.header.lower(): directive for directive in DIRECTIVES}
# Directives that mean something only for JSON-RPC calls.
_FOR_CALLS = ("upstream", "verify", "private", "private_fallback")
USUAL = frozenset(directive.name for directive in DIRECTIVES if directive.is_usual)


def read(given: Iterable[tuple[Directive, str]], *, fresh: bool) -> Directives | None:
    """The directives of a request, or None if it has none. Raises InvalidRequest for an invalid or repeated one."""
    directives: dict[str, Any] = {"fresh": True} if fresh else {}
    for directive, text in given:
        if directive.name in directives:
            raise InvalidRequest(f"{directive.header} must be given once", param=directive.header)
        try:
            directives[directive.name] = directive.read(text.strip())
        except ValueError:
            raise InvalidRequest(
                f"{directive.header} must be {directive.values}{_echo(text)}", param=directive.header
            ) from None
    return Directives(**directives) if directives else None


def _echo(text: str) -> str:
    """The invalid value, unless it may be a key sent in the wrong header."""
    if has_key(text):
        return ""
    return f", not {text[:MAX_ECHO]!r}{'…' if len(text) > MAX_ECHO else ''}"


def refusal(given: Iterable[tuple[Directive, str]], allowed: frozenset[str]) -> Fault | None:
    """The error if a key with these permissions may not use one of the directives."""
    for directive, _ in given:
        if directive.name not in allowed:
            return Forbidden(
                f"this API key may not use {directive.header}: its settings do not list {directive.name!r}",
                param=directive.header,
                reason="directive",
            )
    return None


def on_live_key(directives: Directives | None, *, live: bool) -> Fault | None:
    """The error if a live key wants a fault."""
    if directives is None or directives.fault is None or not live:
        return None
    return InvalidRequest("X-Fault can be used only with test keys (svc_test_)", param="X-Fault", reason="mode")


def unknown_upstream(directives: Directives | None, labels: Collection[str] | None) -> Fault | None:
    """The error if the network has no upstream of that name. `labels`: those of the network; None for requests that are not
    JSON-RPC calls, for which X-Upstream, X-Verify and X-Private are an error."""
    if directives is None:
        return None
    if labels is None:
        named = [BY_NAME[name].header for name in _FOR_CALLS if getattr(directives, name)]
        words = "can be used only with JSON-RPC calls to a network"
        return InvalidRequest(f"{named[0]} {words}", param=named[0]) if named else None
    if not directives.upstream or directives.upstream in labels:
        return None
    return InvalidRequest(
        f"X-Upstream: the network has no upstream {directives.upstream[:MAX_ECHO]!r}", param="X-Upstream"
    )


def allowed_to(names: Sequence[str] | None) -> frozenset[str]:
    """The permissions of a key. None means the usual ones; names of other versions of the program are ignored."""
    return USUAL if names is None else frozenset(name for name in names if name in BY_NAME)
