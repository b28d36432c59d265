"""Polls an SVM network for the topics that no upstream streams.

Slots are read a few times per slot, once for all topics. Accounts and signatures are read together, as many as one call takes.
Each program and each log filter is read on its own and does not delay the others: see `svm_polls.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from proxy.chains.svm.polled_params import COMMITMENTS, PolledParams, read_polled
from proxy.core import jsonrpc
from proxy.errors import Fault
from proxy.services.feed.svm_channel import SvmChannel
from proxy.services.feed.svm_polls import (
    AccountWatch,
    BlockLogsPoll,
    MentionPoll,
    NewestSlots,
    ProgramPoll,
    SlotPoll,
    SlotsUpdatePoll,
    TopicPoll,
    in_context,
    is_reached,
    read_accounts,
    read_in_context,
    read_statuses,
)
from proxy.services.feed.topics import FeedEvent
from proxy.services.rpc.calls import RpcError, call_upstream
from proxy.services.rpc.networks import Route

SHORTEST_POLL_S = 0.2
LONGEST_POLL_S = 2.0
# A scan of all accounts of a program is dear for an upstream.
PROGRAM_POLL_S = 2.0
# The most that an upstream accepts in one call.
ACCOUNTS_PER_CALL = 100
SIGNATURES_PER_CALL = 256
# Polls under way at once.
CONCURRENCY = 16

# Replies of another type than the method returns.
_UNREADABLE = (ValueError, msgspec.DecodeError, RecursionError)
_slot = msgspec.json.Decoder(int).decode


def _now_ms() -> int:
    return int(time.time() * 1000)


def _shown_slot(slot: int, slots: NewestSlots) -> bytes:
    return b'{"parent":%d,"root":%d,"slot":%d}' % (slot - 1, slots["finalized"], slot)


_POLLS: dict[str, Callable[[PolledParams], TopicPoll]] = {
    "slotSubscribe": lambda _: SlotPoll("processed", _shown_slot),
    "rootSubscribe": lambda _: SlotPoll("finalized", lambda slot, _: b"%d" % slot),
    "slotsUpdatesSubscribe": lambda _: SlotsUpdatePoll(_now_ms),
    "programSubscribe": ProgramPoll,
    "logsSubscribe": lambda params: MentionPoll(params) if params.target else BlockLogsPoll(params),
}
POLLED = frozenset((*_POLLS, "accountSubscribe", "signatureSubscribe"))


class SvmPoller:
    """`channels()`: the channels to poll now. `wants(channel)`: whether to poll it still. `end(channel)`: end it."""

    def __init__(
        self,
        route: Route,
        channels: Callable[[], list[SvmChannel]],
        *,
        wants: Callable[[SvmChannel], bool],
        end: Callable[[SvmChannel], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._route = route
        self._channels = channels
        self._wants = wants
        self._end = end
        self._clock = clock
        self._poll_s = min(max(route.network.facts.block_time_s / 3, SHORTEST_POLL_S), LONGEST_POLL_S)
        self._limit = asyncio.Semaphore(CONCURRENCY)
        self._polls: WeakKeyDictionary[SvmChannel, TopicPoll] = WeakKeyDictionary()
        self._accounts: WeakKeyDictionary[SvmChannel, AccountWatch] = WeakKeyDictionary()
        self._signatures: WeakKeyDictionary[SvmChannel, PolledParams] = WeakKeyDictionary()
        # Polls under way, and when programs are due again.
        self._busy: set[object] = set()
        self._due_at: WeakKeyDictionary[SvmChannel, float] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<SvmPoller {self._route.network.id}, {len(self._busy)} under way>"

    async def run(self) -> None:
        """Loop. A poll that takes long is not waited for, and not repeated meanwhile."""
        async with asyncio.TaskGroup() as group:
            while True:
                channels = self._channels()
                slots = await self._slots() if channels else None
                for name, work in self._work(channels, slots) if slots else ():
                    if name in self._busy:
                        work.close()
                        continue
                    self._busy.add(name)
                    group.create_task(self._limited(name, work))
                await asyncio.sleep(self._poll_s)

    def forget(self) -> None:
        """The topics are streamed from now on: discard the state that was polled."""
        for seen in (self._polls, self._accounts, self._signatures, self._due_at):
            seen.clear()

    async def _limited(self, name: object, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._limit:
                await work
        except (RpcError, Fault, *_UNREADABLE):
            pass  # The next round polls again.
        finally:
            self._busy.discard(name)

    async def _slots(self) -> NewestSlots | None:
        """The newest slots. None if no upstream replies."""
        calls = [self._ask("getSlot", [{"commitment": name}]) for name in COMMITMENTS]
        try:
            replies = await asyncio.gather(*calls)
            return dict(zip(COMMITMENTS, map(_slot, replies), strict=True))
        except (RpcError, Fault, *_UNREADABLE):
            return None

    async def _ask(self, method: str, params: list[Any]) -> bytes:
        encoded = msgspec.json.encode(params)
        return await call_upstream(self._route.dispatcher, self._route.policies[method], encoded).result()

    # The work of one round, by what must not run twice at once

    def _work(
        self, channels: list[SvmChannel], slots: NewestSlots
    ) -> Iterator[tuple[object, Coroutine[Any, Any, None]]]:
        accounts: defaultdict[bytes, list[SvmChannel]] = defaultdict(list)
        signatures: list[SvmChannel] = []
        for channel in channels:
            if not self._is_ready(channel):
                continue
            if channel in self._accounts:
                accounts[msgspec.json.encode(self._accounts[channel].config)].append(channel)
            elif channel in self._signatures:
                signatures.append(channel)
            elif self._clock() >= self._due_at.get(channel, 0.0):
                yield channel, self._poll(channel, self._polls[channel], slots)
        for config, same in accounts.items():
            for place, part in enumerate(_parts(same, ACCOUNTS_PER_CALL)):
                yield (config, place), self._read_accounts(part, [self._accounts[channel] for channel in part])
        for place, part in enumerate(_parts(signatures, SIGNATURES_PER_CALL)):
            yield ("signatures", place), self._read_signatures(part, [self._signatures[channel] for channel in part])

    def _is_ready(self, channel: SvmChannel) -> bool:
        """Read the params of a new channel. False if they are not valid."""
        if channel in self._polls or channel in self._accounts or channel in self._signatures:
            return True
        kind = channel.topic.kind
        try:
            params = read_polled(kind, channel.params)
        except ValueError as exc:
            self._refuse(channel, jsonrpc.error(jsonrpc.INVALID_PARAMS, f"{kind}: {exc}"))
            return False
        if kind == "accountSubscribe":
            self._accounts[channel] = AccountWatch(params)
        elif kind == "signatureSubscribe":
            self._signatures[channel] = params
            channel.settled.set()
        else:
            self._polls[channel] = _POLLS[kind](params)
        return True

    def _refuse(self, channel: SvmChannel, error: bytes) -> None:
        """Keep polling a confirmed topic: the error may be temporary."""
        if not channel.settled.is_set():
            channel.refused = error
            self._end(channel)
            channel.settled.set()

    async def _poll(self, channel: SvmChannel, poll: TopicPoll, slots: NewestSlots) -> None:
        if channel.topic.kind == "programSubscribe":
            self._due_at[channel] = self._clock() + PROGRAM_POLL_S
        try:
            events = await poll.poll(self._ask, slots)
        except RpcError as exc:
            self._refuse(channel, exc.error)
            return
        self._publish(channel, events)

    async def _read_accounts(self, channels: Sequence[SvmChannel], watches: Sequence[AccountWatch]) -> None:
        params = [[watch.params.target for watch in watches], watches[0].config]
        try:
            reply = read_in_context(await self._ask("getMultipleAccounts", params))
        except RpcError as exc:
            for channel in channels:
                self._refuse(channel, exc.error)
            return
        for channel, watch, value in zip(channels, watches, read_accounts(reply.value), strict=True):
            self._publish(channel, watch.saw(reply.context.slot, value))

    async def _read_signatures(self, channels: Sequence[SvmChannel], wanted: Sequence[PolledParams]) -> None:
        reply = read_in_context(await self._ask("getSignatureStatuses", [[each.target for each in wanted]]))
        for channel, params, status in zip(channels, wanted, read_statuses(reply.value), strict=True):
            if status is not None and is_reached(status, params.commitment):
                value = b'{"err":%b}' % bytes(status.err)
                self._publish(channel, [in_context(reply.context.slot, value, last=True)])
                self._end(channel)

    def _publish(self, channel: SvmChannel, events: list[FeedEvent]) -> None:
        channel.settled.set()
        # It may have been unsubscribed, or an upstream may stream it by now.
        if self._wants(channel):
            for event in events:
                channel.publish(event)


def _parts(channels: list[SvmChannel], size: int) -> Iterator[list[SvmChannel]]:
    for start in range(0, len(channels), size):
        yield channels[start : start + size]
