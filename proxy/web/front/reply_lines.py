"""The status and header lines of replies on the hot path; those that repeat are prepared as bytes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from proxy.core import jsonrpc
from proxy.core.credits import in_usd
from proxy.core.directives import Directives
from proxy.core.verification import VERIFICATIONS
from proxy.errors import Fault
from proxy.services.rpc.flights import Caller, cost_of
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.networks import Route
from proxy.web.front.record_starts import RecordStart

CLOSE: Final = b"Connection: close\r\n"
DIGITS: Final = [b"%d" % number for number in range(1024)]
UNITS: Final = [b"X-Compute-Units: %d\r\n" % units for units in range(256)]
# The header that says how a reply was found, by the caller's `cache`.
CACHE: Final = {
    "": b"",
    "hit": b"X-Cache: hit\r\n",
    "miss": b"X-Cache: miss\r\n",
    "join": b"X-Cache: join\r\n",
    "stale": b"X-Cache: stale\r\n",
    **{name: b"X-Verified: %b\r\n" % name.encode() for name in VERIFICATIONS},
}


# The first lines of replies to calls.
JSON_START: Final = RecordStart(200, {"Content-Type": "application/json"})
# A cache between the client and us may keep the reply to a GET, which is compressed for other clients.
VARIES: Final = b"Vary: Accept-Encoding\r\n"


def reply_length(size: int) -> bytes:
    """The last header line and the start of the body, for an id and a result of this combined size."""
    return b"Content-Length: %d\r\n\r\n%b" % (
        size + len(jsonrpc.ENVELOPE_START) + len(',"result":}'),
        jsonrpc.ENVELOPE_START,
    )


def length_line(size: int) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % size


REPLY_LENGTHS: Final = [reply_length(size) for size in range(1024)]


def units_line(units: int) -> bytes:
    return UNITS[units] if units < 256 else b"X-Compute-Units: %d\r\n" % units


def block_line(block: int) -> bytes:
    """The block that the state behind a reply has reached; empty if it is unknown."""
    return b"X-Block-Number: %d\r\n" % block if block else b""


def found_lines(state: NetworkState, cache: str, block: int) -> bytes:
    """How a result was found, and the block that the state behind it has reached."""
    lines = CACHE[cache] + block_line(block)
    if block == state.tip:
        state.tip_lines[cache] = lines
    return lines


def upstream_line(route: Route, caller: Caller) -> bytes:
    """Which upstream answered, by its label. Cached replies, batches and refusals have none."""
    if caller.flight is not None:
        label = caller.flight.answered_label
    else:
        is_short = caller.policy is not None and caller.policy.short and not caller.cache and route.only is not None
        label = route.upstreams[0].label if is_short else ""
    return b"X-Upstream: %b\r\n" % label.encode() if label else b""


def cost_line(directives: Directives | None, caller: Caller) -> bytes:
    """The cost of the call at providers, if the request asks for it."""
    if directives is None or not directives.cost:
        return b""
    return b"X-Cost: %b\r\n" % in_usd(cost_of(caller.flight, caller.cache)).encode()


def fault_bytes(fault: Fault, body: bytes, stamp: bytes, common: bytes) -> bytes:
    """The whole reply. `stamp` and `common`: the header lines that every reply has."""
    extra = "".join(f"{name}: {value}\r\n" for name, value in fault.headers.items())
    line = f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}\r\nContent-Type: application/json"
    tail = f"{extra}Content-Length: {len(body)}\r\n\r\n"
    return b"".join((line.encode(), stamp, common, tail.encode(), body))
