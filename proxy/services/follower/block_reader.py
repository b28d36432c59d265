"""Questions about blocks to one network's upstreams, and what of the answers can be believed.

They go the way of all calls: to an upstream that is healthy and far enough, again to another when one fails. An answer that
does not fit together (logs of another block, a block of another number) is none: it is `Unread`, and asked for again later.

An upstream that has no logs of a block yet says so with an empty list, as if there were none. The block itself knows better:
its bloom filter has the topics of its logs. Where that speaks against an empty list, the block's receipts say who is right.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from proxy.chains.evm import facts, log_range
from proxy.chains.evm.facts import BlockFacts, ChainLog, Header, Receipt
from proxy.chains.evm.log_range import LogRange
from proxy.core import dialect
from proxy.core.range_size import RangeSize
from proxy.errors import Fault
from proxy.services.rpc.calls import PendingReply, RpcError
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.networks import Route

# How often an upstream that has no receipts to show says that there are no logs before it is believed: a bloom filter may be
# wrong, too. There is a pause before each.
DOUBTS = 3
# Blocks in doubt: never more than are read ahead, but for those that were dropped meanwhile.
MOST_DOUBTED = 1000


class ReadFailed(Exception):
    """What was asked for could not be read now. `error`: what the upstream said, where it said something."""

    def __init__(self, reason: str, *, error: bytes = b"") -> None:
        super().__init__(reason)
        self.error = error


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """`topics`: the first topics of logs that anybody wants, None for all. `full`: blocks come with whole transactions."""

    topics: frozenset[str] | None
    full: bool = False


class _Asked:
    """What is wanted, as it stands in calls. `rest`: the members of the filter beside its blocks."""

    __slots__ = ("contract", "full", "mask", "masks", "rest", "wanted")

    def __init__(self, wanted: BlockDemand, contract: str) -> None:
        self.wanted = wanted
        self.full = b"true" if wanted.full else b"false"
        self.contract = contract
        self.mask = facts.bloom_mask(contract) if contract else 0
        self.masks = [facts.bloom_mask(topic) for topic in wanted.topics or ()]
        members: dict[str, object] = {"address": contract} if contract else {}
        if wanted.topics is not None:
            members["topics"] = [sorted(wanted.topics)]
        self.rest = msgspec.json.encode(members)[1:-1]

    def may_have(self, header: Header) -> bool:
        bloom = int(header.logs_bloom or "0", 16)
        if bloom & self.mask != self.mask:
            return False
        return any(bloom & mask == mask for mask in self.masks) if self.masks else bool(bloom)

    def is_wanted(self, log: ChainLog) -> bool:
        topics = self.wanted.topics
        is_of_contract = not self.contract or log.address.lower() == self.contract
        return is_of_contract and (topics is None or any(topic in topics for topic in log.topics[:1]))


class BlockReader:
    """What is wanted is given once (`topics`, `full`), or asked for with every block (`wants`)."""

    def __init__(
        self,
        route: Route,
        *,
        topics: frozenset[str] | None = None,
        full: bool = False,
        contract: str = "",
        wants: Callable[[], BlockDemand] | None = None,
    ) -> None:
        self.route = route
        self.span = RangeSize()
        self._contract = contract
        self._wants = wants
        self._last = _Asked(BlockDemand(topics, full), contract)
        # How often there were said to be no logs in a block, by its hash.
        self._doubts: Counter[str] = Counter()

    def _asked(self) -> _Asked:
        if self._wants is not None and (wanted := self._wants()) != self._last.wanted:
            self._last = _Asked(wanted, self._contract)
        return self._last

    def __repr__(self) -> str:
        return f"<BlockReader of {self.route.network.id}, {self.span!r}>"

    async def head(self) -> Header:
        """The newest block that an upstream tells of."""
        found = _header(await self._ask("eth_getBlockByNumber", b'["latest",false]', tells_head=True))
        if found is None:
            raise ReadFailed("no head")
        return found

    async def header(self, number: int) -> Header | None:
        """None where the chain is shorter."""
        return _header(await self._ask("eth_getBlockByNumber", b'["0x%x",false]' % number, least_head=number))

    async def block(self, number: int) -> BlockFacts:
        """One block with its logs, asked for by its hash: they are its own, or none."""
        asked = self._asked()
        params = b'["0x%x",%b]' % (number, asked.full)
        header = _header(await self._ask("eth_getBlockByNumber", params, least_head=number))
        if header is None or int(header.number, 16) != number:
            raise ReadFailed(f"block {number} is not there yet")
        logs = await self._logs_of(header, number, asked.rest)
        if not logs and asked.may_have(header):
            looked = await self._looked_for(header, number, asked)
            if looked is None:
                self._doubt(header, number)
            logs = looked or []
        return _checked(header, header, logs, alone=True, has_all_logs=asked.wanted.topics is None)

    async def _logs_of(self, header: Header, number: int, rest: bytes) -> list[ChainLog]:
        comma = b"," if rest else b""
        params = b'[{"blockHash":"%b"%b%b}]' % (header.hash.encode(), comma, rest)
        return _logs(await self._ask("eth_getLogs", params, least_head=number))

    async def _looked_for(self, header: Header, number: int, asked: _Asked) -> list[ChainLog] | None:
        """The logs of a block that may have some, and was said to have none; None where that is all that can be had."""
        if logs := await self._logs_of(header, number, asked.rest):
            return logs
        try:
            receipts = _receipts(await self._ask("eth_getBlockReceipts", b'["0x%x"]' % number, least_head=number))
        except ReadFailed:
            receipts = []
        if any(receipt.block_hash != header.hash for receipt in receipts):
            raise ReadFailed(f"the receipts are those of another block {number}")
        logs = [log for receipt in receipts for log in receipt.logs if asked.is_wanted(log)]
        return logs if receipts else None

    def _doubt(self, header: Header, number: int) -> None:
        if len(self._doubts) >= MOST_DOUBTED:
            self._doubts.clear()
        self._doubts[header.hash] += 1
        if self._doubts[header.hash] <= DOUBTS:
            raise ReadFailed(f"block {number} has no logs, and its bloom filter has some")
        del self._doubts[header.hash]

    async def blocks(self, first: int, last: int) -> BlockFacts:
        """A range of final blocks: their logs, and the blocks at its ends, which hold it in its place."""
        asked = self._asked()
        try:
            async with asyncio.TaskGroup() as group:
                ends = [group.create_task(self._there(number)) for number in {first, last}]
                found = group.create_task(self._logs(LogRange(first, last, asked.rest)))
        except BaseExceptionGroup as failed:
            # The first that failed: the others were cancelled for it.
            raise failed.exceptions[0] from None
        headers = {int(task.result().number, 16): task.result() for task in ends}
        logs = found.result()
        self.span.read(last - first + 1, len(logs))
        if headers.keys() != {first, last}:
            raise ReadFailed(f"blocks {first} and {last} were asked for, and others given")
        for number, at in ((first, logs[:1]), (last, logs[-1:])):
            await self._check_end(headers[number], number, asked, at)
        return _checked(headers[first], headers[last], logs, alone=False)

    async def _check_end(self, header: Header, number: int, asked: _Asked, logs: list[ChainLog]) -> None:
        """That a range was not cut short: its first, or last, logs are those of the block there, where that has some. Here an
        upstream is believed without receipts: these blocks are old, and their logs are not still to come."""
        if any(int(log.block_number, 16) == number for log in logs) or not asked.may_have(header):
            return
        if await self._looked_for(header, number, asked):
            raise ReadFailed(f"logs of block {number} are missing from those of its range")

    async def _there(self, number: int) -> Header:
        header = await self.header(number)
        if header is None:
            raise ReadFailed(f"block {number} is not there yet")
        return header

    async def _logs(self, asked: LogRange) -> list[ChainLog]:
        try:
            return _logs(await self._ask("eth_getLogs", asked.params(), least_head=asked.last))
        except ReadFailed as exc:
            part = self._smaller(asked, exc.error)
            if part is None:
                raise
        return [log for piece in asked.chunks(part.blocks) for log in await self._logs(piece)]

    def _smaller(self, asked: LogRange, error: bytes) -> LogRange | None:
        """The part of a refused range that would be answered; None where its size was not the reason, or cannot be less."""
        verdict = dialect.classify(error) if error else None
        if verdict is None:
            # Perhaps the reply was too large, or took too long: next time, fewer blocks.
            self.span.refused(asked.blocks // 2)
        if verdict is None or verdict.kind != "range_too_large":
            return None
        part = log_range.narrowed(asked, verdict.message)
        self.span.refused(part.blocks if part else 1)
        return part

    async def _ask(self, method: str, params: bytes, *, least_head: int = 0, tells_head: bool = False) -> bytes:
        pending = PendingReply()
        now = time.monotonic()
        flight = Flight(self.route, self.route.policies[method], params, pending, now)
        # Ranges are cut here, where their size is remembered.
        flight.is_piece = True
        flight.least_head = least_head
        flight.tells_head = tells_head
        pending.flight = flight
        self.route.launch(flight, now)
        try:
            return await pending.result()
        except RpcError as exc:
            raise ReadFailed(exc.error.decode("utf-8", "replace")[:300], error=exc.error) from None
        except Fault as exc:
            raise ReadFailed(exc.message) from None


def _header(result: bytes) -> Header | None:
    try:
        return facts.read_header(result)
    except msgspec.DecodeError as exc:
        raise ReadFailed(f"what came is no block: {exc}") from None


def _logs(result: bytes) -> list[ChainLog]:
    try:
        return facts.read_logs(result)
    except msgspec.DecodeError as exc:
        raise ReadFailed(f"what came are no logs: {exc}") from None


def _receipts(result: bytes) -> list[Receipt]:
    try:
        return facts.read_receipts(result)
    except msgspec.DecodeError as exc:
        raise ReadFailed(f"what came are no receipts: {exc}") from None


def _checked(
    first: Header, last: Header, logs: list[ChainLog], *, alone: bool, has_all_logs: bool = False
) -> BlockFacts:
    try:
        return facts.facts_of(first, last, logs, alone=alone, has_all_logs=has_all_logs)
    except ValueError as exc:
        raise ReadFailed(str(exc)) from None
