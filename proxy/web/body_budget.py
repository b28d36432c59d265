"""Memory for request bodies that are still arriving.

A body that arrives whole costs nothing here. One that comes in parts takes the room of its length until it is complete, so that
many slow senders cannot fill the worker's memory. Two bounds: one for all bodies of the worker, and a quarter of it for each
client, which is an account, or an address before its key is known.
"""

from __future__ import annotations

from proxy import telemetry
from proxy.core.access import place_of
from proxy.errors import Fault, RateLimited, Unavailable

CLIENT_PART = 4


class BodyBudget:
    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._by_client: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<BodyBudget {self._total} of {self._most} bytes for {len(self._by_client)} clients>"

    def take(self, client: str, size: int) -> Fault | None:
        """Take room for a body, or for more of it. Returns the refusal if there is none. A client's only body always fits
        into its own share."""
        client = place_of(client)
        held = self._by_client.get(client, 0)
        if held and held + size > self._most // CLIENT_PART:
            return RateLimited("too many large request bodies at a time: send fewer at once", retry_after_s=1)
        if self._total + size > self._most:
            return Unavailable("too many request bodies are arriving; try again shortly")
        self._by_client[client] = held + size
        self._count(size)
        return None

    def give_back(self, client: str, size: int) -> None:
        client = place_of(client)
        left = self._by_client[client] - size
        if left:
            self._by_client[client] = left
        else:
            del self._by_client[client]
        self._count(-size)

    def _count(self, size: int) -> None:
        self._total += size
        telemetry.arriving_body_bytes.set(self._total)
