"""The envelope of a delivery in both formats, and the event's id.

The id is derived from the recipient and the place of the event, so the same event always has the same id. An event that
was withdrawn and came back, because the chain returned to a dropped block, gets a new id: under the first one,
receivers would treat it as a duplicate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.core.attempts import format_of

# The types of corrections, by format.
CORRECTIONS = {"A": "correction", "B": "CORRECTION"}


def event_id(webhook_id: str, event_type: str, *place: str, time: int = 0) -> str:
    """`place`: network, hash of the block, transaction and the index in it. `time`: how often the event was withdrawn
    before."""
    parts = (webhook_id, event_type, *place, *((str(time),) if time else ()))
    return "evt_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class BodyChain:
    """A network's names in a body."""

    name: str
    id: int


def body_of(
    event: str,
    event_type: str,
    webhook_id: str,
    *,
    chain: BodyChain,
    at: str,
    data: Mapping[str, Any],
    test: bool = False,
) -> bytes:
    """`event`: its id. `at`: ISO 8601 with milliseconds. `test`: whether the body gets the member `test`."""
    marked = {"test": True} if test else {}
    if format_of(event_type) == "A":
        head = {"id": event, "event_type": event_type, "webhook_id": webhook_id, "created_at": at[:19] + "Z"}
    else:
        head = {"id": event, "type": event_type, "createdAt": at, "chain": chain.name, "chainId": chain.id}  # type: ignore[dict-item]
    return msgspec.json.encode({**head, **marked, "data": data})


def chain_of(body: bytes) -> BodyChain:
    """The network's names in a body. A body of Format A has none."""
    said = msgspec.json.decode(body)
    return BodyChain(said.get("chain", ""), said.get("chainId", 0))


def is_test(body: bytes) -> bool:
    return bool(msgspec.json.decode(body).get("test"))


def data_of(body: bytes) -> dict[str, Any]:
    """The data of a body."""
    data: dict[str, Any] = msgspec.json.decode(body)["data"]
    return data


def with_data(body: bytes, data: Mapping[str, Any]) -> bytes:
    """The body with other data."""
    return msgspec.json.encode({**msgspec.json.decode(body), "data": data})


def correction_of(body: bytes) -> tuple[str, dict[str, Any]]:
    """The type and the data of a correction: the event's id and its data."""
    said = msgspec.json.decode(body)
    if "event_type" in said:
        data = said["data"]
        return CORRECTIONS["A"], {
            "chain": data["chain"],
            "takes_back": said["id"],
            "event_type": said["event_type"],
            "reason": "reorg",
            "event": data,
        }
    return CORRECTIONS["B"], {
        "takesBack": said["id"],
        "eventType": said["type"],
        "reason": "reorg",
        "event": said["data"],
    }
