"""The calls that replace each kind of Solana subscription when no upstream streams it.

A poll keeps what it saw last and turns the next reply into events. The first reply is the state before the subscription and
makes none. A reply of an earlier slot than the last one comes from an upstream that is behind and is ignored.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import orjson

from proxy.chains.svm.polled_params import COMMITMENTS, DEFAULT_ENCODING, PolledParams
from proxy.core import jsonrpc
from proxy.errors import Fault
from proxy.services.feed.topics import FeedEvent
from proxy.services.rpc.calls import RpcError

# Makes a call to the network.
Ask = Callable[[str, list[Any]], Awaitable[bytes]]
# The newest slot by commitment.
NewestSlots = Mapping[str, int]

# Slots that are reported after a pause, at most.
MOST_SLOTS = 32
# Transactions that are read for one poll of an account's logs, at most.
MOST_SIGNATURES = 1000
# Bytes of a poll of a program's accounts, at most, and accounts that are read before yielding to the event loop.
MOST_PROGRAM_BYTES = 4 * 1024 * 1024
ACCOUNTS_PER_TURN = 500
TOO_MANY_ACCOUNTS = (
    "the program has too many accounts to be polled, and no upstream streams them: use filters, or a dataSlice"
)
VOTE_PROGRAM = "Vote111111111111111111111111111111111111111"
# Errors of slots that have no block.
SKIPPED = (-32007, -32009)
# An account that was closed, as upstreams report it.
_CLOSED = msgspec.Raw(
    b'{"lamports":0,"data":["","base64"],"owner":"11111111111111111111111111111111","executable":false,"rentEpoch":0,"space":0}'
)


class _PolledContext(msgspec.Struct, gc=False):
    slot: int


class InContext(msgspec.Struct, gc=False):
    context: _PolledContext
    value: msgspec.Raw


class _PolledProgramAccount(msgspec.Struct, gc=False):
    pubkey: str
    account: msgspec.Raw


class SignatureStatus(msgspec.Struct, gc=False):
    err: msgspec.Raw = msgspec.Raw(b"null")
    confirmationStatus: str | None = None


class _PolledSigned(msgspec.Struct, gc=False):
    signature: str
    slot: int


class _PolledMeta(msgspec.Struct, gc=False):
    err: msgspec.Raw = msgspec.Raw(b"null")
    logMessages: list[str] | None = None


class _PolledMessage(msgspec.Struct, gc=False):
    accountKeys: list[str]


class _PolledTransaction(msgspec.Struct, gc=False):
    signatures: list[str]
    message: _PolledMessage


class _PolledLanded(msgspec.Struct, gc=False):
    transaction: _PolledTransaction
    meta: _PolledMeta | None


class _PolledBlock(msgspec.Struct, gc=False):
    transactions: list[_PolledLanded]


class _PolledError(msgspec.Struct, gc=False):
    code: int = 0


class _PolledLandedAt(msgspec.Struct, gc=False):
    slot: int
    meta: _PolledMeta | None


read_in_context = msgspec.json.Decoder(InContext).decode
read_accounts = msgspec.json.Decoder(list[msgspec.Raw]).decode
read_statuses = msgspec.json.Decoder(list[SignatureStatus | None]).decode
_program_account = msgspec.json.Decoder(_PolledProgramAccount).decode
_signed = msgspec.json.Decoder(list[_PolledSigned]).decode
_block = msgspec.json.Decoder(_PolledBlock | None).decode
_landed = msgspec.json.Decoder(_PolledLandedAt | None).decode
_code = msgspec.json.Decoder(_PolledError).decode
_numbers = msgspec.json.Decoder(list[int]).decode
_any = msgspec.json.Decoder().decode


def in_context(slot: int, value: bytes | msgspec.Raw, *, last: bool = False) -> FeedEvent:
    return FeedEvent(b'{"context":{"slot":%d},"value":%b}' % (slot, bytes(value)), slot, last)


def is_reached(status: SignatureStatus, commitment: str) -> bool:
    """Whether a transaction is as certain as a subscription wants. Without a status it is final."""
    reached = status.confirmationStatus or COMMITMENTS[-1]
    return COMMITMENTS.index(reached) >= COMMITMENTS.index(commitment) if reached in COMMITMENTS else False


class TopicPoll(Protocol):
    async def poll(self, ask: Ask, slots: NewestSlots) -> list[FeedEvent]:
        """The events since the last poll. Raises RpcError or a Fault."""


def is_behind(slot: int, last: int) -> bool:
    """Whether an upstream is behind the last slot. A slot that is lower by far means that the network was restarted, or that
    the last slot was wrong."""
    return last - MOST_SLOTS * 10 <= slot < last


class SlotPoll:
    """New slots at one commitment. `show(slot, slots)`: the notification."""

    def __init__(self, commitment: str, show: Callable[[int, NewestSlots], bytes]) -> None:
        self._commitment = commitment
        self._show = show
        self._last = 0

    def __repr__(self) -> str:
        return f"<SlotPoll {self._commitment} {self._last}>"

    async def poll(self, ask: Ask, slots: NewestSlots) -> list[FeedEvent]:
        newest = slots[self._commitment]
        first = max(self._last + 1, newest - MOST_SLOTS + 1) if self._last else newest + 1
        if not is_behind(newest, self._last):
            self._last = newest
        return [FeedEvent(self._show(slot, slots), slot) for slot in range(first, newest + 1)]


class SlotsUpdatePoll:
    """The stages of each slot: it is completed, then confirmed, then rooted. `now_ms` is the time of notifications."""

    TYPES: Mapping[str, bytes] = {
        "processed": b"completed",
        "confirmed": b"optimisticConfirmation",
        "finalized": b"root",
    }

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._polls = [SlotPoll(name, self._shown_as(kind)) for name, kind in self.TYPES.items()]

    def _shown_as(self, kind: bytes) -> Callable[[int, NewestSlots], bytes]:
        return lambda slot, _: b'{"slot":%d,"timestamp":%d,"type":"%b"}' % (slot, self._now_ms(), kind)

    async def poll(self, ask: Ask, slots: NewestSlots) -> list[FeedEvent]:
        return [event for each in self._polls for event in await each.poll(ask, slots)]


class AccountWatch:
    """The last state of one account, as a hash, because the state may have megabytes. It is read together with others."""

    def __init__(self, params: PolledParams) -> None:
        self.params = params
        self._slot = 0
        # The hash of the value as an upstream wrote it, and of its canonical form.
        self._seen: tuple[int, int] | None = None

    @property
    def config(self) -> dict[str, Any]:
        return {"encoding": DEFAULT_ENCODING, **self.params.config, "commitment": self.params.commitment}

    def saw(self, slot: int, value: msgspec.Raw) -> list[FeedEvent]:
        account = _CLOSED if bytes(value) == jsonrpc.NULL else value
        if is_behind(slot, self._slot):
            return []
        before, self._slot, written = self._seen, slot, hash(bytes(account))
        if before is not None and before[0] == written:
            return []
        # Two upstreams may write the same value in different ways.
        self._seen = written, hash(orjson.dumps(_any(account), option=orjson.OPT_SORT_KEYS))
        if before is None or before[1] == self._seen[1]:
            return []
        return [in_context(slot, account)]


class ProgramPoll:
    """All accounts of a program. A closed account no longer belongs to the program and makes no event.

    There may be many: one number is kept for each, and they are read in several turns of the event loop."""

    def __init__(self, params: PolledParams) -> None:
        self._params = [params.target, {**params.config, "commitment": params.commitment, "withContext": True}]
        self._slot = 0
        # The hashes of all accounts with their state, in order.
        self._seen: array[int] | None = None

    def __repr__(self) -> str:
        return f"<ProgramPoll {len(self._seen or ())} accounts>"

    @property
    def memory(self) -> int:
        """The bytes that it keeps."""
        return 0 if self._seen is None else self._seen.itemsize * len(self._seen)

    async def poll(self, ask: Ask, slots: NewestSlots) -> list[FeedEvent]:
        result = await ask("getProgramAccounts", self._params)
        if len(result) > MOST_PROGRAM_BYTES:
            raise RpcError(jsonrpc.error(jsonrpc.LIMIT_EXCEEDED, TOO_MANY_ACCOUNTS))
        reply = read_in_context(result)
        slot = reply.context.slot
        if is_behind(slot, self._slot):
            return []
        accounts = read_accounts(reply.value)
        before = None if self._seen is None else frozenset(self._seen)
        seen, events = array("q"), list[FeedEvent]()
        for start in range(0, len(accounts), ACCOUNTS_PER_TURN):
            await asyncio.sleep(0)
            for raw in accounts[start : start + ACCOUNTS_PER_TURN]:
                each = _program_account(raw)
                state = hash((each.pubkey, bytes(each.account)))
                seen.append(state)
                if before is not None and state not in before:
                    events.append(in_context(slot, msgspec.json.encode(each)))
        self._slot, self._seen = slot, seen
        return events


class MentionPoll:
    """The logs of transactions that mention an account, from the account's history."""

    def __init__(self, params: PolledParams) -> None:
        self._target = params.target
        self._commitment = params.at_least_confirmed
        self._until: str | None = None
        self._started = False

    def __repr__(self) -> str:
        return f"<MentionPoll {self._target} since {self._until}>"

    async def poll(self, ask: Ask, slots: NewestSlots) -> list[FeedEvent]:
        config: dict[str, Any] = {"commitment": self._commitment, "limit": MOST_SIGNATURES if self._started else 1}
        if self._until is not None:
            config["until"] = self._until
        new = _signed(await ask("getSignaturesForAddress", [self._target, config]))
        if not self._started:
            self._started, self._until = True, new[0].signature if new else None
            return []
        events: list[FeedEvent] = []
        with suppress(RpcError, Fault):
            for each in reversed(new):
                landed = _landed(await ask("getTransaction", [each.signature, self._transaction_config]))
                if landed is None:
                    break
                self._until = each.signature
                events.append(_logs_event(landed.slot, each.signature, landed.meta))
        return events  # The next poll starts at the first transaction that could not be read.

    @property
    def _transaction_config(self) -> dict[str, Any]:
        return {"commitment": self._commitment, "encoding": "base64", "maxSupportedTransactionVersion": 0}


class BlockLogsPoll:
    """The logs of all transactions, from the blocks."""

    def __init__(self, params: PolledParams) -> None:
        self._commitment = params.at_least_confirmed
        self._with_votes = params.with_votes
        self._last = 0

    def __repr__(self) -> str:
        return f"<BlockLogsPoll {self._last}>"

    async def poll(self, ask: Ask, slots: NewestSlots) -> list[FeedEvent]:
        newest = slots[self._commitment]
        if not self._last or newest <= self._last:
            self._last = self._last or newest
            return []
        first = max(self._last + 1, newest - MOST_SLOTS + 1)
        produced = _numbers(await ask("getBlocks", [first, newest, {"commitment": self._commitment}]))
        events: list[FeedEvent] = []
        with suppress(RpcError, Fault):
            for slot in produced:
                events += self._events_of(slot, await self._block(ask, slot))
                self._last = slot
            self._last = newest
        return events  # The next poll starts at the first block that could not be read.

    async def _block(self, ask: Ask, slot: int) -> list[_PolledLanded]:
        config = {"commitment": self._commitment, "encoding": "json", "transactionDetails": "full", "rewards": False}
        try:
            block = _block(await ask("getBlock", [slot, {**config, "maxSupportedTransactionVersion": 0}]))
        except RpcError as exc:
            if _code(exc.error).code in SKIPPED:
                return []
            raise
        return [] if block is None else block.transactions

    def _events_of(self, slot: int, transactions: list[_PolledLanded]) -> list[FeedEvent]:
        return [
            _logs_event(slot, each.transaction.signatures[0], each.meta)
            for each in transactions
            if self._with_votes or VOTE_PROGRAM not in each.transaction.message.accountKeys
        ]


def _logs_event(slot: int, signature: str, meta: _PolledMeta | None) -> FeedEvent:
    meta = meta or _PolledMeta()
    value = {"signature": signature, "err": meta.err, "logs": meta.logMessages or []}
    return in_context(slot, msgspec.json.encode(value))
