"""Faults on demand: how replies to a test key are spoiled, so that a client's handling of failures can be tested.

A plan is written as in `latency=800ms, status=503, p=0.2`. `FAULTS` is the table of its parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.core import jsonrpc

MOST_TEXT = 200
# Larger requests and replies are not read for a fault: that would delay other clients.
MOST_REQUEST, MOST_REPLY = 16_384, 1 << 20
LONGEST_LATENCY_MS = 30_000
MOST_STALE = 10_000
SLOWEST_BODY, FASTEST_BODY = 16, 1 << 30
STATUSES = (400, 401, 403, 404, 408, 429, 500, 502, 503, 504)
_LATENCY = re.compile(r"([0-9]{1,6})(ms|s)", re.ASCII)
_SPEED = re.compile(r"([0-9]{1,6})(B|KB|MB)/s", re.ASCII)
_CODE = re.compile(r"-?[0-9]{1,6}", re.ASCII)
_SHARE = re.compile(r"(?:0?\.[0-9]{1,6}|1|1\.0|0)", re.ASCII)
_UNITS = {"B": 1, "KB": 1000, "MB": 1_000_000}


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What happens to a request. Each default means that nothing does."""

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
    # The share of requests that are affected.
    p: float = 1.0


@dataclass(frozen=True, slots=True)
class FaultPart:
    name: str
    # The member of the plan, and how its value is read; None for a part without a value.
    member: str
    read: Callable[[str], Any] | None
    form: str
    about: str


def _latency(text: str) -> int:
    found = _LATENCY.fullmatch(text)
    ms = int(found[1]) * (1000 if found[2] == "s" else 1) if found else -1
    return _within(ms, 1, LONGEST_LATENCY_MS)


def _status(text: str) -> int:
    if text not in map(str, STATUSES):
        raise ValueError
    return int(text)


def _code(text: str) -> int:
    if not _CODE.fullmatch(text) or int(text) == 0:
        raise ValueError
    return int(text)


def _blocks(text: str) -> int:
    return _within(int(text) if text.isascii() and text.isdigit() and len(text) < 7 else -1, 1, MOST_STALE)


def _speed(text: str) -> int:
    found = _SPEED.fullmatch(text)
    return _within(int(found[1]) * _UNITS[found[2]] if found else -1, SLOWEST_BODY, FASTEST_BODY)


def _share(text: str) -> float:
    if not _SHARE.fullmatch(text):
        raise ValueError
    return float(text)


def _within(value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ValueError
    return value


FAULTS = (
    FaultPart("latency", "latency_ms", _latency, "latency=800ms", "Wait before the request is served, up to 30 s."),
    FaultPart("status", "status", _status, "status=503", f"Reply with this status: {', '.join(map(str, STATUSES))}."),
    FaultPart("error", "error", _code, "error=-32005", "Reply with a JSON-RPC error of this code."),
    FaultPart("empty", "empty", None, "empty", "Reply with `null`, or with an empty list where the result is a list."),
    FaultPart("stale", "stale", _blocks, "stale=5", "Answer calls at `latest` as of so many blocks before."),
    FaultPart("reset", "reset", None, "reset", "Reset the connection instead of a reply."),
    FaultPart("truncate", "truncate", None, "truncate", "End the connection after half of the body."),
    FaultPart("slow-body", "slow_body", _speed, "slow-body=1KB/s", "Send the body at this rate: B/s, KB/s or MB/s."),
    FaultPart("p", "p", _share, "p=0.2", "Affect only this share of the requests, by chance."),
)
_BY_NAME: Mapping[str, FaultPart] = {part.name: part for part in FAULTS}


def plan_of(text: str) -> FaultPlan:
    """Read a plan. Raises ValueError with the part that is not valid."""
    if len(text) > MOST_TEXT:
        raise ValueError("it is too long")
    found: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = part.partition("=")
        known = _BY_NAME.get(name)
        if known is None or known.member in found or bool(equals) is (known.read is None):
            raise ValueError(part)
        try:
            found[known.member] = True if known.read is None else known.read(value)
        except ValueError:
            raise ValueError(part) from None
    if not found.keys() - {"p"}:
        raise ValueError(text)
    return FaultPlan(**found)


# Changes to JSON-RPC requests and replies


def aged(body: bytes, tip: int, blocks: int) -> bytes:
    """The request with `latest` replaced by a block so many below the tip."""
    return body.replace(b'"latest"', b'"%b"' % hex(max(0, tip - blocks)).encode())


def spoiled(plan: FaultPlan, body: bytes, reply: bytes) -> bytes:
    """The reply to a JSON-RPC request, as the plan wants it."""
    if (not plan.empty and not plan.stale) or len(body) > MOST_REQUEST or len(reply) > MOST_REPLY:
        return reply
    try:
        calls, replies = orjson.loads(body), orjson.loads(reply)
    except orjson.JSONDecodeError:
        return reply
    methods = {str(call.get("id")): call.get("method") for call in _listed(calls) if isinstance(call, dict)}
    for each in _listed(replies):
        if isinstance(each, dict) and "result" in each:
            each["result"] = _changed(plan, methods.get(str(each.get("id"))), each["result"])
    return orjson.dumps(replies)


def _changed(plan: FaultPlan, method: object, result: Any) -> Any:
    if plan.empty:
        return [] if isinstance(result, list) else None
    if method == "eth_blockNumber" and isinstance(result, str):
        return hex(max(0, int(result, 16) - plan.stale))
    return result


def error_of(plan: FaultPlan) -> bytes:
    return jsonrpc.error(plan.error, "injected by X-Fault")


def error_replies(body: bytes, error: bytes) -> bytes | None:
    """The error for each call of the request; None if the request is large or not valid JSON."""
    if len(body) > MOST_REQUEST:
        return None
    try:
        calls = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    shown = orjson.Fragment(error)
    replies = [
        {"jsonrpc": "2.0", "id": call.get("id"), "error": shown} for call in _listed(calls) if isinstance(call, dict)
    ]
    return orjson.dumps(replies if isinstance(calls, list) else replies[0]) if replies else None


def _listed(data: Any) -> list[Any]:
    return data if isinstance(data, list) else [data]
