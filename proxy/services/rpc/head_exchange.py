"""Keeps the heads of all hosts in step, over a channel of Valkey.

A host that learns of a new head, a reorganisation or a write publishes it; the others apply it through the head that their
workers share, as if one of them had learned of it. The reply to a write waits until Valkey has the message, so that a client
that reads from another host next finds what it wrote. A host that starts, or has missed messages, reads the heads as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from proxy.services.rpc.network_state import NetworkState
from proxy.store.valkey.valkey_address import TAG
from proxy.store.valkey.valkey_link import ValkeyLink
from proxy.tasks import Tasks

# The number is the version of the message.
CHANNEL = f"{TAG}:heads:1"
HEAD = "penstock_head_1"
# A reply waits this long for its message to be published, and a moment more: the answer may have arrived while this process
# was stopped.
WRITE_S = 0.005
MOMENT_S = 0.001
# A head that no host renews for this long is forgotten: all hosts are down.
KEPT_MS = 60_000

# After HOLDER, the kind names an upstream that has the head. Versions without this take any other kind for a head that moved.
MOVED, LOWERED, WROTE = "moved", "lowered", "wrote"
HOLDER = "@"


class HeadExchange:
    def __init__(self, link: ValkeyLink, host: str, tasks: Tasks) -> None:
        self._link = link
        # Empty until `start`: the states publish through this object, so it is built before them.
        self._states: Mapping[str, NetworkState] = {}
        self._host = host
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<HeadExchange of {len(self._states)} networks, {self._link!r}>"

    async def start(self, states: Mapping[str, NetworkState]) -> None:
        """Follow other hosts. Until the link is up, nothing is published."""
        self._states = states
        self._link.listen(CHANNEL, self._on_message)
        self._link.on_change.append(self._on_change)
        await self.read()

    # News of this host

    def moved(self, network: str, tip: int, short_hash: int, *, is_lower: bool, holder: int) -> None:
        kind = LOWERED if is_lower else f"{MOVED}{HOLDER}{holder:x}"
        message = f"{self._host} {kind} {network} {tip} {short_hash}"
        self._link.send(("FCALL", HEAD, "1", _key(network), CHANNEL, message, str(KEPT_MS)), _ignore)

    def wrote(self, network: str, note: str, then: Callable[[], None]) -> None:
        """Publish a write with its note, and call `then` when other hosts have got the message, or after a moment.

        Valkey answers the publisher before it sends the message to the others: only the answer to a command that follows shows
        that all were sent."""
        waiting = [then]

        def go_on(_: Any = None) -> None:
            if waiting:
                waiting.pop()()

        def published(_: Any) -> None:
            if waiting and not self._link.send(("PING",), go_on):
                go_on()

        if self._link.send(("PUBLISH", CHANNEL, f"{self._host} {WROTE} {network} {note}"), published):
            self._loop.call_later(WRITE_S, lambda: self._loop.call_later(MOMENT_S, go_on))
        else:
            go_on()

    # News of other hosts

    def _on_message(self, message: bytes) -> None:
        host, kind, network, rest = message.decode().split(" ", 3)
        state = self._states.get(network)
        if state is None or host == self._host:
            return
        if kind == WROTE:
            state.follow_write(rest)
        else:
            tip, short_hash = rest.split(" ")
            holder = int(kind.partition(HOLDER)[2] or "0", 16)
            state.follow(int(tip), int(short_hash), is_lower=kind == LOWERED, holder=holder)

    def _on_change(self) -> None:
        if self._link.is_up:
            self._tasks.start("heads of the fleet", self._catch_up)

    async def _catch_up(self) -> None:
        for state in self._states.values():
            state.discard_recent()
        await self.read()

    async def read(self) -> None:
        """Apply the heads that other hosts have published."""
        replies = await asyncio.gather(*(self._link.ask("GET", _key(network)) for network in self._states))
        for reply in replies:
            if isinstance(reply, bytes):
                self._on_message(reply)


def _key(network: str) -> str:
    return f"{TAG}:head:{network}"


def _ignore(_: Any) -> None: ...
