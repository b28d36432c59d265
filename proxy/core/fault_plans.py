"""Faults on demand: how replies, events and deliveries of a test key are made faulty, to test a client's handling of failures.

A plan is written as in `latency=800ms, status=503, p=0.2`. `FAULTS` is the table of its parts. Each part applies to some
surfaces and has no effect on the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import orjson

from proxy.core import jsonrpc

MOST_TEXT = 200
# Larger requests and replies are not read for a fault: that would delay other clients.
MOST_REQUEST, MOST_REPLY = 16_384, 131_072
LONGEST_LATENCY_MS = 30_000
MOST_STALE = 10_000
SLOWEST_BODY, FASTEST_BODY = 16, 1 << 30
# Delayed events of a socket wait in memory.
LONGEST_DELAY_MS = 60_000
MOST_EVENTS = 1000
# The events of this many blocks are kept to be sent again.
MOST_REORG = 64
# Each copy of a delivery is one more request to its receiver.
MOST_COPIES = 5
STATUSES = (400, 401, 403, 404, 408, 429, 500, 502, 503, 504)
_PERIOD = re.compile(r"([0-9]{1,6})(ms|s)", re.ASCII)
_SPEED = re.compile(r"([0-9]{1,6})(B|KB|MB)/s", re.ASCII)
_CODE = re.compile(r"-?[0-9]{1,6}", re.ASCII)
_SHARE = re.compile(r"(?:0?\.[0-9]{1,6}|1|1\.0|0)", re.ASCII)
_UNITS = {"B": 1, "KB": 1000, "MB": 1_000_000}
# JSON that orjson cannot read, or cannot write because it writes fewer levels than it reads; and heads that are not numbers.
_UNUSUAL = (orjson.JSONDecodeError, orjson.JSONEncodeError, ValueError)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a request, socket or webhook. Each default means none."""

    latency_ms: int = 0
    status: int = 0
    # The code of a JSON-RPC error.
    error: int = 0
    empty: bool = False
    # How many blocks `latest` is behind.
    stale: int = 0
    reset: bool = False
    truncate: bool = False
    # Bytes of the body per second.
    slow_body: int = 0
    # After how many events a socket is dropped.
    drop: int = 0
    # How much later events and deliveries are sent.
    delay_ms: int = 0
    # How many blocks are taken back and sent again.
    reorg: int = 0
    # How many times a delivery is repeated.
    duplicate: int = 0
    correction: bool = False
    # The share of requests, subscriptions and events that are affected.
    p: float = 1.0

    @property
    def spoils_events(self) -> bool:
        return bool(self.drop or self.delay_ms or self.reorg)


FaultSurface = Literal["JSON-RPC", "REST", "sockets", "webhooks"]


@dataclass(frozen=True, slots=True)
class FaultPart:
    name: str
    # The member of the plan, and how its value is read; None for a part without a value.
    member: str
    read: Callable[[str], Any] | None
    form: str
    surfaces: tuple[FaultSurface, ...]
    about: str


def _period(most_ms: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        match = _PERIOD.fullmatch(text)
        ms = int(match[1]) * (1000 if match[2] == "s" else 1) if match else -1
        return _within(ms, 1, most_ms)

    return read


def _status(text: str) -> int:
    if text not in map(str, STATUSES):
        raise ValueError
    return int(text)


def _code(text: str) -> int:
    if not _CODE.fullmatch(text) or int(text) == 0:
        raise ValueError
    return int(text)


def _count(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        return _within(int(text) if text.isascii() and text.isdigit() and len(text) < 7 else -1, 1, most)

    return read


def _speed(text: str) -> int:
    match = _SPEED.fullmatch(text)
    return _within(int(match[1]) * _UNITS[match[2]] if match else -1, SLOWEST_BODY, FASTEST_BODY)


def _share(text: str) -> float:
    if not _SHARE.fullmatch(text):
        raise ValueError
    return float(text)


def _within(value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ValueError
    return value


_CALLS: tuple[FaultSurface, ...] = ("JSON-RPC", "REST", "sockets")
_HTTP: tuple[FaultSurface, ...] = ("JSON-RPC", "REST")
_EVENTS: tuple[FaultSurface, ...] = ("sockets",)
_DELIVERIES: tuple[FaultSurface, ...] = ("webhooks",)

FAULTS = (
    FaultPart(
        "latency", "latency_ms", _period(LONGEST_LATENCY_MS), "latency=800ms", _CALLS,
        "Wait before the request is served, up to 30 s.",
    ),
    FaultPart(
        "status", "status", _status, "status=503", _CALLS,
        f"Reply with this status: {', '.join(map(str, STATUSES))}. On a socket, with the error that stands for it.",
    ),
    FaultPart(
        "error", "error", _code, "error=-32005", ("JSON-RPC", "sockets"), "Reply with a JSON-RPC error of this code.",
    ),
    FaultPart(
        "empty", "empty", None, "empty", ("JSON-RPC", "sockets"),
        "Reply with `null`, or with an empty list where the result is a list.",
    ),
    FaultPart(
        "stale", "stale", _count(MOST_STALE), "stale=5", ("JSON-RPC", "sockets"),
        "Answer calls at `latest` as of this many blocks before.",
    ),
    FaultPart("reset", "reset", None, "reset", _CALLS, "Reset the connection instead of a reply."),
    FaultPart(
        "truncate", "truncate", None, "truncate", _CALLS,
        "End the connection after half of the body. On a socket, instead of a reply.",
    ),
    FaultPart(
        "slow-body", "slow_body", _speed, "slow-body=1KB/s", _HTTP, "Send the body at this rate: B/s, KB/s or MB/s.",
    ),
    FaultPart(
        "drop", "drop", _count(MOST_EVENTS), "drop=3", _EVENTS,
        "Reset the connection after this many events of its subscriptions.",
    ),
    FaultPart(
        "delay", "delay_ms", _period(LONGEST_DELAY_MS), "delay=2s", ("sockets", "webhooks"),
        "Send events of subscriptions, and deliveries, this much later, up to 60 s.",
    ),
    FaultPart(
        "reorg", "reorg", _count(MOST_REORG), "reorg=2", _EVENTS,
        "Each time this many blocks have had events, take them back: logs come again with `removed`, newest first, then all"
        " of them as new. Heads come again.",
    ),
    FaultPart(
        "duplicate", "duplicate", _count(MOST_COPIES), "duplicate=1", _DELIVERIES,
        "Deliver each event this many times more, with the same id.",
    ),
    FaultPart(
        "correction", "correction", None, "correction", _DELIVERIES,
        "After each delivery, send a correction that takes the event back, then the event again under a new id.",
    ),
    FaultPart(
        "p", "p", _share, "p=0.2", (*_CALLS, "webhooks"),
        "Affect only this share of the requests, subscriptions or webhook events, by chance.",
    ),
)  # fmt: skip
_NO_FAULT = FaultPlan()
_UNIT_OF = {"latency_ms": "ms", "delay_ms": "ms", "slow_body": "B/s"}
_BY_NAME: Mapping[str, FaultPart] = {part.name: part for part in FAULTS}


def plan_of(text: str) -> FaultPlan:
    """Read a plan. Raises ValueError with the part that is not valid."""
    if len(text) > MOST_TEXT:
        raise ValueError("it is too long")
    members: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = part.partition("=")
        known = _BY_NAME.get(name)
        if known is None or known.member in members or bool(equals) is (known.read is None):
            raise ValueError(part)
        try:
            members[known.member] = True if known.read is None else known.read(value)
        except ValueError:
            raise ValueError(part) from None
    if not members.keys() - {"p"}:
        raise ValueError(text)
    return FaultPlan(**members)


def parts_of(plan: FaultPlan, surface: FaultSurface) -> FaultPlan | None:
    """The parts of a plan that apply to this surface; None if there are none."""
    members = {part.member: getattr(plan, part.member) for part in _used(plan) if surface in part.surfaces}
    return FaultPlan(**members) if members.keys() - {"p"} else None


def plan_for(text: str, surface: FaultSurface) -> FaultPlan:
    """Read a plan for this surface. Raises ValueError with the part that is not valid or does not apply to it."""
    plan = plan_of(text)
    for part in _used(plan):
        if surface not in part.surfaces:
            raise ValueError(part.name)
    return plan


def text_of(plan: FaultPlan) -> str:
    """The plan as it is written."""
    return ", ".join(_written(part, getattr(plan, part.member)) for part in _used(plan))


def _used(plan: FaultPlan) -> list[FaultPart]:
    return [part for part in FAULTS if getattr(plan, part.member) != getattr(_NO_FAULT, part.member)]


def _written(part: FaultPart, value: Any) -> str:
    if value is True:
        return part.name
    number = f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
    return f"{part.name}={number}{_UNIT_OF.get(part.member, '')}"


def affects(plan: FaultPlan, event_id: str) -> bool:
    """Whether an event is among the share that is affected. It is the same for every attempt to deliver the event."""
    return int.from_bytes(blake2b(event_id.encode(), digest_size=4).digest(), "big") < plan.p * (1 << 32)


# Changes to JSON-RPC requests and replies


def aged(body: bytes, tip: int, blocks: int) -> bytes:
    """The request with `latest` replaced by a block this far below the tip."""
    return body.replace(b'"latest"', b'"%b"' % hex(max(0, tip - blocks)).encode())


def faulty(plan: FaultPlan, body: bytes, reply: bytes, heads: Collection[str] = ()) -> bytes:
    """The reply to a JSON-RPC request, as the plan wants it; unchanged if it cannot be read. `heads`: methods whose result is
    the number of the head."""
    if (not plan.empty and not plan.stale) or len(body) > MOST_REQUEST or len(reply) > MOST_REPLY:
        return reply
    try:
        return _with_results_changed(plan, orjson.loads(body), orjson.loads(reply), heads)
    except _UNUSUAL:
        return reply


def _with_results_changed(plan: FaultPlan, calls: Any, replies: Any, heads: Collection[str]) -> bytes:
    methods = {str(call.get("id")): call.get("method") for call in _listed(calls) if isinstance(call, dict)}
    for each in _listed(replies):
        if isinstance(each, dict) and "result" in each:
            each["result"] = _changed(plan, each["result"], is_head=methods.get(str(each.get("id"))) in heads)
    return orjson.dumps(replies)


def faulty_result(plan: FaultPlan, result: bytes, *, is_head: bool) -> bytes:
    """One result, as the plan wants it. `is_head`: whether it is the number of the head."""
    try:
        if len(result) <= MOST_REPLY:
            return orjson.dumps(_changed(plan, orjson.loads(result), is_head=is_head))
    except _UNUSUAL:
        pass
    return b"null" if plan.empty else result


def _changed(plan: FaultPlan, result: Any, *, is_head: bool) -> Any:
    if plan.empty:
        return [] if isinstance(result, list) else None
    if is_head and isinstance(result, str):
        return hex(max(0, int(result, 16) - plan.stale))
    return result


def error_of(plan: FaultPlan) -> bytes:
    return jsonrpc.error(plan.error, "injected by X-Fault")


def error_replies(body: bytes, error: bytes) -> bytes | None:
    """The error for each call of the request; None if the request is large or cannot be read."""
    if len(body) > MOST_REQUEST:
        return None
    try:
        return _with_error(orjson.loads(body), error)
    except _UNUSUAL:
        return None


def _with_error(calls: Any, error: bytes) -> bytes | None:
    shown = orjson.Fragment(error)
    replies = [
        {"jsonrpc": "2.0", "id": call.get("id"), "error": shown} for call in _listed(calls) if isinstance(call, dict)
    ]
    return orjson.dumps(replies if isinstance(calls, list) else replies[0]) if replies else None


def _listed(data: Any) -> list[Any]:
    return data if isinstance(data, list) else [data]
