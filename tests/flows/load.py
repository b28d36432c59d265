"""Load: many connections that send a new request after every reply, and a tally of the replies."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from tests.http_client import HttpClient, Reply

# The pause between a reply and the next request: short enough to exceed every limit, long enough to let others run.
PAUSE_S = 0.01
DAY_S = 86_400


@dataclass
class Tally:
    """Counts of requests and replies. Times are the client's: the server acted between a send and its reply."""

    admitted: int = 0
    refused: list[Reply] = field(default_factory=list)
    others: list[Reply] = field(default_factory=list)
    first_sent: float = math.inf
    first_reply: float = math.inf
    last_sent: float = 0.0
    last_reply: float = 0.0

    def note(self, reply: Reply, sent: float, received: float) -> None:
        self.first_sent = min(self.first_sent, sent)
        self.first_reply = min(self.first_reply, received)
        self.last_sent = max(self.last_sent, sent)
        self.last_reply = max(self.last_reply, received)
        if reply.status == 200:
            self.admitted += 1
        else:
            (self.refused if reply.status == 429 else self.others).append(reply)

    def bounds(self, capacity: float, rate: float) -> tuple[int, int]:
        """Return the fewest and the most requests that a bucket of this capacity and rate admits in the measured time.

        The most counts from before the first send to after the last reply. The fewest is 2 % below what the time from the
        first reply to the last send allows, in whole requests.
        """
        most = math.floor(capacity + rate * (self.last_reply - self.first_sent))
        least = math.floor(0.98 * (capacity + rate * (self.last_sent - self.first_reply)))
        return least, most

    def __repr__(self) -> str:
        took = self.last_reply - self.first_sent
        return (
            f"<Tally {self.admitted} admitted, {len(self.refused)} refused, {len(self.others)} others in {took:.3f} s>"
        )


async def saturate(clients: list[HttpClient], data: bytes, *, for_s: float) -> Tally:
    """Send the same request repeatedly on every connection."""
    tally = Tally()
    end = time.monotonic() + for_s
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(_repeat(client, data, end, tally))
    return tally


async def _repeat(client: HttpClient, data: bytes, end: float, tally: Tally) -> None:
    while (sent := time.monotonic()) < end:
        reply = await client.send(data)
        tally.note(reply, sent, time.monotonic())
        await asyncio.sleep(PAUSE_S)


def is_over(reply: Reply) -> None:
    """Return whether a reply says that the daily quota is used up."""
    error = reply.fault(429)
    assert error["details"] == {"reason": "daily_quota"}
    to_midnight = DAY_S - reply.at % DAY_S
    assert abs(int(reply.headers["retry-after"]) - to_midnight) <= 5


async def spend(client: HttpClient, key: str) -> int:
    """Send requests to one worker until its daily quota is used up; return how many it admitted."""
    admitted = 0
    for _ in range(500):
        reply = await client.call("eth_chainId", key=key)
        if reply.status == 429 and int(reply.headers["retry-after"]) > 1:
            is_over(reply)
            return admitted
        # With little quota left, a worker may ask the client to wait a moment while it leases more.
        assert reply.status in (200, 429)
        admitted += reply.status == 200
        await asyncio.sleep(0.02)
    raise AssertionError(f"the day never ends: {admitted} admitted")
