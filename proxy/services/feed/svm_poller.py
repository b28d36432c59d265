"""Polls an SVM network for the topics that no upstream streams.

Slots are read a few times per slot, once for all topics and at our own expense. All other polls are calls of the accounts that
listen: they pay the list price of each call before it is made, and share the upstreams as with their own calls. The accounts of
one topic take turns. Each account has its own places for polls, and its topics wait for these in order, so a flood of topics,
slow polls or a lack of units delays only the account's own topics.

Accounts and signatures are read together, as many of one account's as one call takes. Each program and each log filter is read
on its own: see `svm_polls.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from proxy.chains.svm.polled_params import COMMITMENTS, PolledParams, read_polled
from proxy.core import jsonrpc
from proxy.errors import Fault, RateLimited, Unavailable
from proxy.services.feed.channel import FeedChannel
from proxy.services.feed.feed_terms import FeedTerms
from proxy.services.feed.svm_polls import (
    AccountWatch,
    Ask,
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
from proxy.services.feed.topics import FeedEvent, Listener
from proxy.services.rpc.calls import RpcError, call_upstream
from proxy.services.rpc.networks import Route

SHORTEST_POLL_S = 0.2
LONGEST_POLL_S = 2.0
# A scan of all accounts of a program is expensive for an upstream.
PROGRAM_POLL_S = 2.0
# The most that an upstream accepts in one call.
ACCOUNTS_PER_CALL = 100
SIGNATURES_PER_CALL = 256
# How long a poll waits for the units of one listener before it looks for another of the same account.
PATIENCE_S = 1.0
# How long the topics of an account are not polled if it will have no units for a long time.
REST_S = 5.0
# Less than this is not counted as memory: the number of an account's subscriptions bounds it.
COUNTED_FROM = 4096
NO_MEMORY = "the program has too many accounts for the memory of this account: use filters, or end other subscriptions"

# Replies of another type than the method returns, or with numbers that cannot be encoded again.
_UNREADABLE = (ValueError, TypeError, OverflowError, msgspec.DecodeError, RecursionError)
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
# Topics whose notifications follow from the slots alone.
_FREE = frozenset(("slotSubscribe", "rootSubscribe", "slotsUpdatesSubscribe"))
_OWN = ""
POLLED = frozenset((*_POLLS, "accountSubscribe", "signatureSubscribe"))


@dataclass(frozen=True, slots=True)
class _PollWork:
    """Calls for some channels that one account pays for."""

    account: str
    channels: Sequence[FeedChannel]
    run: Callable[[Ask], Awaitable[None]]


class SvmPoller:
    """`channels()`: the channels to poll now. `wants(channel)`: whether it is still to be polled. `end(channel)`: end it."""

    def __init__(
        self,
        route: Route,
        terms: FeedTerms,
        channels: Callable[[], list[FeedChannel]],
        *,
        wants: Callable[[FeedChannel], bool],
        end: Callable[[FeedChannel], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._route = route
        self._terms = terms
        self._channels = channels
        self._wants = wants
        self._end = end
        self._clock = clock
        self._poll_s = min(max(route.network.facts.block_time_s / 3, SHORTEST_POLL_S), LONGEST_POLL_S)
        self._polls: WeakKeyDictionary[FeedChannel, TopicPoll] = WeakKeyDictionary()
        self._accounts: WeakKeyDictionary[FeedChannel, AccountWatch] = WeakKeyDictionary()
        self._signatures: WeakKeyDictionary[FeedChannel, PolledParams] = WeakKeyDictionary()
        # Channels that are being polled, and when programs are due again.
        self._busy: set[FeedChannel] = set()
        self._due_at: WeakKeyDictionary[FeedChannel, float] = WeakKeyDictionary()
        # For each channel, the account whose memory holds its last state, and the bytes.
        self._held: dict[FeedChannel, tuple[str, int]] = {}
        # Accounts that will have no units for a long time, and when they are tried again.
        self._resting: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<SvmPoller {self._route.network.id}, {len(self._busy)} under way>"

    async def run(self) -> None:
        """Loop. A slow poll is not waited for, and not repeated while it runs."""
        async with asyncio.TaskGroup() as group:
            while True:
                channels = self._channels()
                slots = await self._slots() if channels else None
                for work in self._work(channels, slots) if slots else ():
                    self._busy.update(work.channels)
                    group.create_task(self._do(work))
                await asyncio.sleep(self._poll_s)

    def forget(self) -> None:
        """The topics are streamed from now on: discard the state that was polled."""
        for seen in (self._polls, self._accounts, self._signatures, self._due_at):
            seen.clear()
        for channel in [*self._held]:
            self.release(channel)

    def release(self, channel: FeedChannel) -> None:
        """The channel has ended: its memory is free."""
        if (held := self._held.pop(channel, None)) is not None:
            self._terms.topic_memory.give_back(*held)

    async def _do(self, work: _PollWork) -> None:
        try:
            async with self._terms.polls.of(work.account):
                await work.run(partial(self._ask_for, work))
        except RateLimited:
            self._resting[work.account] = self._clock() + REST_S
        except (RpcError, Fault, *_UNREADABLE):
            pass  # The next round polls again.
        finally:
            self._busy.difference_update(work.channels)

    async def _slots(self) -> NewestSlots | None:
        """The newest slots. None if no upstream replies."""
        calls = [self._ask("getSlot", [{"commitment": name}]) for name in COMMITMENTS]
        try:
            replies = await asyncio.gather(*calls)
            return dict(zip(COMMITMENTS, map(_slot, replies), strict=True))
        except (RpcError, Fault, *_UNREADABLE):
            return None

    async def _ask(self, method: str, params: list[Any], account: str = "") -> bytes:
        encoded = msgspec.json.encode(params)
        return await call_upstream(
            self._route.dispatcher, self._route.policies[method], encoded, client=account
        ).result()

    async def _ask_for(self, work: _PollWork, method: str, params: list[Any]) -> bytes:
        """Make a call for the account, which pays first."""
        policy = self._route.policies[method]
        units = self._route.state.price(policy, msgspec.json.encode(params))
        while not self._payer_of(work).charge(units, policy.tally):
            # The listener may leave while it waits.
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._payer_of(work).wait_for_units()
        return await self._ask(method, params, work.account)

    def _payer_of(self, work: _PollWork) -> Listener:
        for channel in work.channels:
            if (payer := channel.listeners.of_account(work.account)) is not None:
                return payer
        raise Unavailable("the account has unsubscribed")

    # The work of one round

    def _work(self, channels: list[FeedChannel], slots: NewestSlots) -> Iterator[_PollWork]:
        accounts: defaultdict[tuple[str, bytes], list[FeedChannel]] = defaultdict(list)
        signatures: defaultdict[str, list[FeedChannel]] = defaultdict(list)
        now = self._clock()
        self._resting = {account: until for account, until in self._resting.items() if until > now}
        for channel in channels:
            if channel in self._busy or not self._is_ready(channel) or (payer := self._next_payer(channel)) is None:
                continue
            if channel in self._accounts:
                accounts[payer, msgspec.json.encode(self._accounts[channel].config)].append(channel)
            elif channel in self._signatures:
                signatures[payer].append(channel)
            elif now >= self._due_at.get(channel, 0.0):
                poll = partial(self._poll, channel, self._polls[channel], slots, payer)
                yield _PollWork(_OWN if channel.topic.kind in _FREE else payer, [channel], poll)
        for (payer, _), same in accounts.items():
            for part in _parts(same, ACCOUNTS_PER_CALL):
                watches = [self._accounts[channel] for channel in part]
                yield _PollWork(payer, part, partial(self._read_accounts, part, watches))
        for payer, of_payer in signatures.items():
            for part in _parts(of_payer, SIGNATURES_PER_CALL):
                wanted = [self._signatures[channel] for channel in part]
                yield _PollWork(payer, part, partial(self._read_signatures, part, wanted))

    def _next_payer(self, channel: FeedChannel) -> str | None:
        """The account whose turn it is to pay for a channel; None if no account can."""
        for account in channel.listeners.accounts:
            if account not in self._resting:
                channel.listeners.pass_turn(account)
                return account
        return None

    def _is_ready(self, channel: FeedChannel) -> bool:
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

    def _refuse(self, channel: FeedChannel, error: bytes) -> None:
        """Keep polling a confirmed topic: the error may be temporary."""
        if not channel.settled.is_set():
            channel.refused = error
            self._end(channel)
            channel.settled.set()

    async def _poll(self, channel: FeedChannel, poll: TopicPoll, slots: NewestSlots, payer: str, ask: Ask) -> None:
        if channel.topic.kind == "programSubscribe":
            self._due_at[channel] = self._clock() + PROGRAM_POLL_S
        try:
            events = await poll.poll(ask, slots)
        except RpcError as exc:
            self._refuse(channel, exc.error)
            return
        if isinstance(poll, ProgramPoll) and not self._hold(channel, payer, poll.memory):
            return
        self._publish(channel, events)

    def _hold(self, channel: FeedChannel, account: str, size: int) -> bool:
        """Count the last state of a channel as memory of the account. If its account has no room for it, end the channel and
        return False."""
        self.release(channel)
        if size < COUNTED_FROM or not self._wants(channel):
            return True
        if self._terms.topic_memory.take(account, size):
            self._held[channel] = account, size
            return True
        self._refuse(channel, jsonrpc.error(jsonrpc.LIMIT_EXCEEDED, NO_MEMORY))
        for listener in channel.listeners:
            listener.on_end(RateLimited(NO_MEMORY, retry_after_s=1))
        return False

    async def _read_accounts(self, channels: Sequence[FeedChannel], watches: Sequence[AccountWatch], ask: Ask) -> None:
        params = [[watch.params.target for watch in watches], watches[0].config]
        try:
            reply = read_in_context(await ask("getMultipleAccounts", params))
        except RpcError as exc:
            for channel in channels:
                self._refuse(channel, exc.error)
            return
        for channel, watch, value in zip(channels, watches, read_accounts(reply.value), strict=True):
            self._publish(channel, watch.saw(reply.context.slot, value))

    async def _read_signatures(self, channels: Sequence[FeedChannel], wanted: Sequence[PolledParams], ask: Ask) -> None:
        reply = read_in_context(await ask("getSignatureStatuses", [[each.target for each in wanted]]))
        for channel, params, status in zip(channels, wanted, read_statuses(reply.value), strict=True):
            if status is not None and is_reached(status, params.commitment):
                value = b'{"err":%b}' % bytes(status.err)
                self._publish(channel, [in_context(reply.context.slot, value, last=True)])
                self._end(channel)

    def _publish(self, channel: FeedChannel, events: list[FeedEvent]) -> None:
        channel.settled.set()
        # It may have been unsubscribed, or an upstream may stream it by now.
        if self._wants(channel):
            for event in events:
                channel.publish(event)


def _parts(channels: list[FeedChannel], size: int) -> Iterator[list[FeedChannel]]:
    for start in range(0, len(channels), size):
        yield channels[start : start + size]
