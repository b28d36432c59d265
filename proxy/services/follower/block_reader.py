"""Read the blocks and logs of one network and verify them.

The calls are routed like any other: to a healthy upstream at or above the block, and to another one when it fails. A reply
that is inconsistent (logs of another block, a block with another number) raises `ReadFailed`, and the caller tries later.

An upstream that does not have a block's logs yet returns an empty list, as if the block had none. The block's bloom filter
contains the topics of its logs: if it contradicts an empty list, the block's receipts decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from proxy.chains.evm import facts, log_range
from proxy.chains.evm.facts import BlockFacts, ChainLog, Header, Receipt
from proxy.chains.evm.head_reader import UNKNOWN_PARENT
from proxy.chains.evm.log_range import LogRange
from proxy.chains.registry import Network
from proxy.core import upstream_errors
from proxy.core.lru_cache import LruCache
from proxy.core.range_size import RangeSize
from proxy.errors import Fault
from proxy.services.rpc.calls import RpcError, call_upstream
from proxy.services.rpc.networks import Route
from proxy.wire.upstream import Upstream

# Empty replies, with a pause between them, after which a block counts as having no logs if no upstream has its receipts:
# the bloom filter may be wrong as well.
EMPTY_RETRIES = 3
# Headers of a range that are read at the same time.
HEADERS_AT_ONCE = 16
# Receipts of a block that are read at the same time, from upstreams that cannot return them together.
RECEIPTS_AT_ONCE = 16
# Numbers of logs at which some upstreams truncate a reply without an error.
CAPS = frozenset((1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000))
# Bounds memory: blocks with an empty reply. Usually a few, but dropped blocks stay.
MAX_DOUBTED = 1000


class ReadFailed(Exception):
    """The data could not be read now. `error` is the upstream's JSON-RPC error, if it returned one."""

    def __init__(self, reason: str, *, error: bytes = b"") -> None:
        super().__init__(reason)
        self.error = error


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """The data that the sinks need: logs with these first topics (None: all logs), with `full`, full transactions, and with
    `receipts`, the outcomes of the transactions."""

    topics: frozenset[str] | None
    full: bool = False
    receipts: bool = False


class _Query:
    """A demand as it is written into calls. `members` are the JSON members of the log filter apart from its blocks."""

    __slots__ = ("contract", "demand", "full", "mask", "masks", "members")

    def __init__(self, demand: BlockDemand, contract: str) -> None:
        self.demand = demand
        self.full = b"true" if demand.full else b"false"
        self.contract = contract
        self.mask = facts.bloom_mask(contract) if contract else 0
        self.masks = [facts.bloom_mask(topic) for topic in demand.topics or ()]
        members: dict[str, object] = {"address": contract} if contract else {}
        if demand.topics is not None:
            members["topics"] = [sorted(demand.topics)]
        self.members = msgspec.json.encode(members)[1:-1]

    def may_match(self, header: Header) -> bool:
        bloom = int(header.logs_bloom or "0", 16)
        if bloom & self.mask != self.mask:
            return False
        return any(bloom & mask == mask for mask in self.masks) if self.masks else bool(bloom)

    def matches(self, log: ChainLog) -> bool:
        topics = self.demand.topics
        is_of_contract = not self.contract or log.address.lower() == self.contract
        return is_of_contract and (topics is None or any(topic in topics for topic in log.topics[:1]))


class RangeChecks:
    """Checks every block of a range, at a limited rate of calls, which are counted."""

    def __init__(self, *, every_block: bool = True, calls_per_second: float = 0.0) -> None:
        """`every_block`: whether a block without logs is checked against its bloom filter, or only those at the ends."""
        self.every_block = every_block
        self._interval_s = 1 / calls_per_second if calls_per_second else 0.0
        self._next_at = 0.0
        self.calls = 0

    def __repr__(self) -> str:
        return f"<RangeChecks after {self.calls} calls>"

    async def call(self) -> None:
        """Count a call, and wait until it may be made."""
        self.calls += 1
        if not self._interval_s:
            return
        now = asyncio.get_running_loop().time()
        at = max(self._next_at, now)
        self._next_at = at + self._interval_s
        if at > now:
            await asyncio.sleep(at - now)


class BlockReader:
    """Reads blocks with a fixed demand (`topics`), or with one that is queried for every block (`demand`)."""

    def __init__(
        self,
        route: Route,
        *,
        topics: frozenset[str] | None = None,
        contract: str = "",
        demand: Callable[[], BlockDemand] | None = None,
        upstream: Upstream | None = None,
        checks: RangeChecks | None = None,
    ) -> None:
        """`upstream`: the only one that is called. `checks`: of the ranges that it returns; None for those at their ends."""
        self.route = route
        self._upstream = upstream
        self._checks = checks
        self.range_size = RangeSize()
        self._contract = contract
        self._demand = demand
        self._last_query = _Query(BlockDemand(topics), contract)
        # The number of empty replies by block hash.
        self._empty_replies: LruCache[str, int] = LruCache(MAX_DOUBTED)

    def of_upstream(self, upstream: Upstream, checks: RangeChecks) -> BlockReader:
        """A reader of the same logs that calls this upstream only."""
        topics = self._last_query.demand.topics
        return BlockReader(self.route, topics=topics, contract=self._contract, upstream=upstream, checks=checks)

    def _query(self) -> _Query:
        if self._demand is not None and (demand := self._demand()) != self._last_query.demand:
            self._last_query = _Query(demand, self._contract)
        return self._last_query

    def __repr__(self) -> str:
        return f"<BlockReader of {self.route.network.id}, {self.range_size!r}>"

    @property
    def network(self) -> Network:
        return self.route.network

    @property
    def final(self) -> int:
        """The newest final block, negative while unknown."""
        return self.route.heads.final

    async def head(self) -> Header:
        """Return the newest block of an upstream."""
        header = _header(await self._call("eth_getBlockByNumber", b'["latest",false]', reports_head=True))
        if header is None:
            raise ReadFailed("no head")
        return header

    async def header(self, number: int) -> Header | None:
        """Return the header, or None if the chain is shorter."""
        return _header(await self._call("eth_getBlockByNumber", b'["0x%x",false]' % number, least_head=number))

    async def block(self, number: int) -> BlockFacts:
        """Return one block with its logs, which are fetched by its hash so that they cannot be those of a fork."""
        query = self._query()
        params = b'["0x%x",%b]' % (number, query.full)
        header = _header(await self._call("eth_getBlockByNumber", params, least_head=number))
        if header is None or int(header.number, 16) != number:
            raise ReadFailed(f"block {number} does not exist yet")
        await self._find_parent(header, number)
        if query.demand.receipts:
            receipts = await self.receipts(header, number)
            logs = [log for receipt in receipts for log in receipt.logs if query.matches(log)]
            block = _checked(header, header, logs, alone=True, has_all_logs=query.demand.topics is None)
            return replace(block, failed=failed_of(receipts))
        logs = await self._logs_of(header, number, query.members)
        if not logs and query.may_match(header):
            verified = await self._verify_empty(header, number, query)
            if verified is None:
                self._doubt(header, number)
            logs = verified or []
        return _checked(header, header, logs, alone=True, has_all_logs=query.demand.topics is None)

    async def outcomes(self, number: int) -> tuple[Header, frozenset[str]]:
        """One block with its transactions, and the hashes of those that failed."""
        header = _header(await self._call("eth_getBlockByNumber", b'["0x%x",true]' % number, least_head=number))
        if header is None or int(header.number, 16) != number:
            raise ReadFailed(f"block {number} does not exist yet")
        return header, failed_of(await self.receipts(header, number))

    async def receipts(self, header: Header, number: int) -> list[Receipt]:
        """The receipts of all transactions of a block."""
        names = _hashes(header)
        if not names:
            return []
        try:
            receipts = _receipts(await self._call("eth_getBlockReceipts", b'["0x%x"]' % number, least_head=number))
        except ReadFailed as exc:
            if not exc.error or upstream_errors.classify(exc.error).kind != "unsupported":
                raise
            receipts = []
            for at in range(0, len(names), RECEIPTS_AT_ONCE):
                receipts += await asyncio.gather(
                    *(self._receipt(each, number) for each in names[at:][:RECEIPTS_AT_ONCE])
                )
        if len(receipts) != len(names) or any(receipt.block_hash != header.hash for receipt in receipts):
            raise ReadFailed(f"the receipts of block {number} are incomplete or belong to another block")
        return receipts

    async def _receipt(self, name: str, number: int) -> Receipt:
        result = await self._call("eth_getTransactionReceipt", b'["%b"]' % name.encode(), least_head=number)
        try:
            receipt = facts.read_receipt(result)
        except msgspec.DecodeError as exc:
            raise ReadFailed(f"malformed receipt: {exc}") from None
        if receipt is None:
            raise ReadFailed(f"the receipt of transaction {name} is missing")
        return receipt

    async def _logs_of(self, header: Header, number: int, members: bytes, *, elsewhere: bool = False) -> list[ChainLog]:
        comma = b"," if members else b""
        params = b'[{"blockHash":"%b"%b%b}]' % (header.hash.encode(), comma, members)
        return _logs(await self._call("eth_getLogs", params, least_head=number, elsewhere=elsewhere))

    async def _verify_empty(self, header: Header, number: int, query: _Query) -> list[ChainLog] | None:
        """Fetch the logs of a block again if an empty reply contradicts its bloom filter, then from its receipts. None if
        there are no receipts either."""
        if logs := await self._other_logs_of(header, number, query.members):
            return logs
        try:
            receipts = _receipts(await self._call("eth_getBlockReceipts", b'["0x%x"]' % number, least_head=number))
        except ReadFailed:
            receipts = []
        if any(receipt.block_hash != header.hash for receipt in receipts):
            raise ReadFailed(f"the receipts of block {number} belong to another block")
        logs = [log for receipt in receipts for log in receipt.logs if query.matches(log)]
        return logs if receipts else None

    async def _other_logs_of(self, header: Header, number: int, members: bytes) -> list[ChainLog]:
        """The logs of a block from another upstream, if this reader has one of its own."""
        if self._upstream is None or len(self.route.upstreams) == 1:
            return await self._logs_of(header, number, members)
        try:
            return await self._logs_of(header, number, members, elsewhere=True)
        except ReadFailed:
            # Another upstream may not know the block, or not serve it any more.
            return await self._logs_of(header, number, members)

    def _doubt(self, header: Header, number: int) -> None:
        """Count an empty reply. Raises ReadFailed unless there were enough of them to accept it."""
        count = self._empty_replies[header.hash] = self._empty_replies.get(header.hash, 0) + 1
        if count <= EMPTY_RETRIES:
            raise ReadFailed(f"no logs returned for block {number}, but its bloom filter has some")
        del self._empty_replies[header.hash]

    async def blocks(self, first: int, last: int) -> BlockFacts:
        """Return the logs of a range of final blocks, verified against the blocks at its two ends."""
        query = self._query()
        try:
            async with asyncio.TaskGroup() as group:
                ends = [group.create_task(self.existing_header(number)) for number in {first, last}]
                reading = group.create_task(self._logs(LogRange(first, last, query.members)))
        except BaseExceptionGroup as failed:
            # The first failure; the other tasks were cancelled because of it.
            raise failed.exceptions[0] from None
        headers = {int(task.result().number, 16): task.result() for task in ends}
        logs = reading.result()
        self.range_size.read(last - first + 1, len(logs))
        if headers.keys() != {first, last}:
            raise ReadFailed(f"requested blocks {first} and {last}, but got others")
        await self._find_parent(headers[first], first)
        for number, at in ((first, logs[:1]), (last, logs[-1:])):
            await self._check_end(headers[number], number, query, at)
        if self._checks is not None and self._checks.every_block:
            await self._check_between(first, last, query, logs)
        await self._find_times(logs, headers)
        return _checked(headers[first], headers[last], logs, alone=False)

    async def _check_between(self, first: int, last: int, query: _Query, logs: list[ChainLog]) -> None:
        """Check the blocks within a range that have no logs."""
        present = {int(log.block_number, 16) for log in logs}
        wanted = [number for number in range(first + 1, last) if number not in present]
        for at in range(0, len(wanted), HEADERS_AT_ONCE):
            part = wanted[at : at + HEADERS_AT_ONCE]
            for number, header in zip(part, await asyncio.gather(*map(self.existing_header, part)), strict=True):
                await self._check_end(header, number, query, [])

    async def _find_times(self, logs: list[ChainLog], headers: Mapping[int, Header]) -> None:
        """Add the times of their blocks to logs of an upstream that does not return them."""
        missing = {int(log.block_number, 16) for log in logs if log.block_timestamp is None}
        by_number = dict(headers)
        wanted = sorted(missing - by_number.keys())
        for at in range(0, len(wanted), HEADERS_AT_ONCE):
            part = wanted[at : at + HEADERS_AT_ONCE]
            by_number |= zip(part, await asyncio.gather(*map(self.existing_header, part)), strict=True)
        for log in logs:
            header = by_number.get(int(log.block_number, 16)) if log.block_timestamp is None else None
            if header is not None and header.hash != log.block_hash:
                raise ReadFailed(f"logs of a block {int(header.number, 16)} that was replaced")
            if header is not None:
                log.block_timestamp = header.timestamp

    async def _check_end(self, header: Header, number: int, query: _Query, logs: list[ChainLog]) -> None:
        """Check that a range was not truncated: `logs`, its first or last, must be from the block at that end if the block
        has any. Without receipts an empty reply is accepted, because these blocks are old and their logs complete."""
        if any(int(log.block_number, 16) == number for log in logs) or not query.may_match(header):
            return
        if await self._verify_empty(header, number, query):
            raise ReadFailed(f"logs of block {number} are missing from those of its range")

    async def _find_parent(self, header: Header, number: int) -> None:
        """Replace a parent hash that the upstream does not know by the hash of the block before."""
        if header.parent_hash == UNKNOWN_PARENT and number:
            header.parent_hash = (await self.existing_header(number - 1)).hash

    async def existing_header(self, number: int) -> Header:
        header = await self.header(number)
        if header is None:
            raise ReadFailed(f"block {number} does not exist yet")
        return header

    async def _logs(self, blocks: LogRange) -> list[ChainLog]:
        try:
            logs = _logs(await self._call("eth_getLogs", blocks.params(), least_head=blocks.last))
        except ReadFailed as exc:
            part = self._narrowed(blocks, exc.error)
            if part is None:
                raise
        else:
            if self._checks is None or len(logs) not in CAPS or blocks.blocks == 1:
                return logs
            # Perhaps truncated without an error: its halves decide.
            part = next(blocks.chunks((blocks.blocks + 1) // 2))
            self.range_size.refused(part.blocks)
        return [log for piece in blocks.chunks(part.blocks) for log in await self._logs(piece)]

    def _narrowed(self, blocks: LogRange, error: bytes) -> LogRange | None:
        """The part of a refused range that the upstream would serve. None if its size was not the reason or is minimal."""
        verdict = upstream_errors.classify(error) if error else None
        if verdict is None:
            # Perhaps the reply was too large or took too long: request fewer blocks next time.
            self.range_size.refused(blocks.blocks // 2)
        if verdict is None or verdict.kind != "range_too_large":
            return None
        part = log_range.narrowed(blocks, verdict.message)
        self.range_size.refused(part.blocks if part else 1)
        return part

    async def _call(
        self,
        method: str,
        params: bytes,
        *,
        least_head: int = 0,
        reports_head: bool = False,
        elsewhere: bool = False,
    ) -> bytes:
        if self._checks is not None:
            await self._checks.call()
        # Ranges are split by this reader, which remembers the size that works.
        pending = call_upstream(
            self.route.dispatcher,
            self.route.policies[method],
            params,
            upstream=None if elsewhere else self._upstream,
            avoid=self._upstream if elsewhere else None,
            least_head=least_head,
            reports_head=reports_head,
            is_piece=True,
        )
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
        raise ReadFailed(f"malformed block: {exc}") from None


def _logs(result: bytes) -> list[ChainLog]:
    try:
        return facts.read_logs(result)
    except msgspec.DecodeError as exc:
        raise ReadFailed(f"malformed logs: {exc}") from None


def _receipts(result: bytes) -> list[Receipt]:
    try:
        return facts.read_receipts(result)
    except msgspec.DecodeError as exc:
        raise ReadFailed(f"malformed receipts: {exc}") from None


def failed_of(receipts: Iterable[Receipt]) -> frozenset[str]:
    """The hashes of the transactions that failed."""
    return frozenset(
        each.transaction_hash for each in receipts if each.status is not None and int(each.status, 16) == 0
    )


class _Named(msgspec.Struct, gc=False):
    hash: str


_read_hashes = msgspec.json.Decoder(list[str | _Named]).decode


def _hashes(header: Header) -> list[str]:
    """The hashes of a block's transactions, which are whole or hashes only."""
    try:
        return [each if isinstance(each, str) else each.hash for each in _read_hashes(header.transactions)]
    except msgspec.DecodeError as exc:
        raise ReadFailed(f"malformed transactions: {exc}") from None


def _checked(
    first: Header, last: Header, logs: list[ChainLog], *, alone: bool, has_all_logs: bool = False
) -> BlockFacts:
    try:
        return facts.facts_of(first, last, logs, alone=alone, has_all_logs=has_all_logs)
    except ValueError as exc:
        raise ReadFailed(str(exc)) from None
