"""Failed authentications on other hosts: each host publishes its own once a second, and charges those of the others to the
buckets of the same addresses. Nothing waits for it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

from proxy.store.shared_memory.bucket_table import SharedBucketTable
from proxy.store.valkey.valkey_address import TAG
from proxy.store.valkey.valkey_link import ValkeyLink

CHANNEL = f"{TAG}:failures:1"
PUBLISH_S = 1.0
# The most addresses in a message: a flood from more of them is spread too thin to be stopped by address.
MOST = 1000
# The size of an address's bucket: the seconds in which an empty one is refilled.
HOLDS_S = 60.0


class FleetFailures:
    def __init__(self, link: ValkeyLink, buckets: SharedBucketTable, host: str, per_minute: int) -> None:
        self._link = link
        self._buckets = buckets
        self._host = host
        self._cost_s = HOLDS_S / per_minute
        self._counted: Counter[str] = Counter()
        self._serial = itertools.count(time.monotonic_ns())

    def __repr__(self) -> str:
        return f"<FleetFailures {len(self._counted)} to publish>"

    def note(self, prefix: str) -> None:
        if len(self._counted) < MOST or prefix in self._counted:
            self._counted[prefix] += 1

    async def run(self) -> None:
        """A supervised loop."""
        self._link.listen(CHANNEL, self._on_message)
        while True:
            await asyncio.sleep(PUBLISH_S)
            if self._counted:
                counted, self._counted = self._counted, Counter()
                words = " ".join(f"{prefix}={count}" for prefix, count in counted.items())
                self._link.send(("PUBLISH", CHANNEL, f"{self._host} {next(self._serial)} {words}"), _ignore)

    def _on_message(self, message: bytes) -> None:
        host, serial, *words = message.decode().split(" ")
        now = time.monotonic()
        # Every worker of the host gets the message; the one that takes the message's own bucket charges it.
        if host == self._host or self._buckets.take(f"message {host} {serial}", now, HOLDS_S, holds_s=HOLDS_S):
            return
        for word in words:
            prefix, _, count = word.rpartition("=")
            self._buckets.owe(prefix, now, int(count) * self._cost_s, holds_s=HOLDS_S)


def _ignore(_: Any) -> None: ...
