"""Fetch the blocks and logs of one network: from the upstream that announced a block first, then from any other.

Every reply is checked: a block must have the requested hash, a log must belong to its block. A missing or invalid reply
raises `BlockUnavailable`, and the caller decides what to do about it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from proxy.chains.evm.head_reader import HEAD_BLOCK_CALL
from proxy.chains.evm.log_filter import LogFilter
from proxy.core import jsonrpc
from proxy.core.head_chain import ChainBlock
from proxy.core.lru_cache import LruCache
from proxy.core.usage import Tally
from proxy.errors import Fault
from proxy.services.rpc.calls import PendingReply, RpcError, call_upstream
from proxy.services.rpc.networks import Route
from proxy.services.rpc.probe import Probe
from proxy.services.rpc.probing import result_of
from proxy.wire.upstream import Upstream

# Blocks cached by hash: enough for a few replays that run side by side.
CACHED_BLOCKS = 512
# Requests for a block before its source counts as wrong, and the pause that grows between them.
ATTEMPTS = 4
PAUSE_S = 0.1
# Concurrent requests for blocks that are fetched ahead.
CONCURRENCY = 8
# Members of a block that a newHeads notification does not have.
_NOT_IN_A_HEAD = ("transactions", "uncles", "withdrawals", "size", "totalDifficulty")
# Sent for chains without a base fee.
_NO_BASE_FEE = msgspec.Raw(b'"0x0"')
_EMPTY = (b"[]", b"[ ]")


class BlockUnavailable(Exception):
    """No upstream returned the block or logs requested."""


class CallPayer(Protocol):
    """Pays for calls before they are made."""

    async def pay(self, units: int, tally: Tally) -> str:
        """Pay for a call and return the account that makes it. Raises BlockUnavailable or a Fault if no account pays."""


class LogRecord(msgspec.Struct, gc=False):
    """A log: the members that filters compare, and its original JSON."""

    address: str
    topics: list[str]
    block_hash: str
    block: int
    raw: msgspec.Raw


class _Head(msgspec.Struct, gc=False):
    number: str
    hash: str
    parentHash: str
    logsBloom: str = ""


class _Receipt(msgspec.Struct, gc=False):
    logs: msgspec.Raw


class _Log(msgspec.Struct, gc=False):
    address: str
    topics: list[str]
    blockHash: str
    blockNumber: str


_HASH = re.compile(r"0x[0-9a-f]{64}")
_NUMBER = re.compile(r"0x[0-9a-fA-F]{1,16}")
_head = msgspec.json.Decoder(_Head).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_logs = msgspec.json.Decoder(list[_Log]).decode
_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode
_receipts = msgspec.json.Decoder(list[_Receipt]).decode
_text = msgspec.json.Decoder(str).decode


class BlockSource:
    def __init__(
        self,
        route: Route,
        *,
        payer: CallPayer | None = None,
        cached: LruCache[str, ChainBlock] | None = None,
        fetches: asyncio.Semaphore | None = None,
    ) -> None:
        """`fetches`: the places for blocks that are fetched ahead."""
        self._route = route
        self._payer = payer
        self._fetches = asyncio.Semaphore(CONCURRENCY) if fetches is None else fetches
        self._cached: LruCache[str, ChainBlock] = LruCache(CACHED_BLOCKS) if cached is None else cached

    def __repr__(self) -> str:
        return f"<BlockSource of {self._route.network.id}, {len(self._cached)} cached>"

    @property
    def network(self) -> str:
        return self._route.network.id

    def paid_by(self, payer: CallPayer, fetches: asyncio.Semaphore | None = None) -> BlockSource:
        """The same blocks for accounts that make the calls and pay for each."""
        return BlockSource(self._route, payer=payer, cached=self._cached, fetches=fetches)

    def clear(self) -> None:
        self._cached.clear()

    # Heads

    async def latest(self, upstream: Upstream) -> ChainBlock:
        """Return the head of one upstream."""
        block = read_block(await result_of(Probe(upstream, *HEAD_BLOCK_CALL)))
        if block is None:
            raise BlockUnavailable("no head")
        return self._cache(block)

    async def newest(self) -> int:
        """Query every upstream and return the highest block number; with three or more upstreams, the second highest."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(result_of(Probe(each, "eth_blockNumber"))) for each in self._route.upstreams]
        heads = sorted((_number_in(task.result()) for task in tasks), reverse=True)
        return heads[1] if len(heads) > 2 else heads[0]

    async def by_hash(self, block_hash: str, source: Upstream | None = None) -> ChainBlock:
        for attempt in range(ATTEMPTS):
            if (cached := self._cached.get(block_hash)) is not None:
                return cached
            params = b'["%b",false]' % block_hash.encode()
            block = read_block(await self._call_source_first("eth_getBlockByHash", params, source))
            if block is not None and block.hash == block_hash:
                return self._cache(block)
            await asyncio.sleep(PAUSE_S * attempt)
        raise BlockUnavailable(f"no block {block_hash}")

    async def by_number(self, number: int, source: Upstream | None = None) -> ChainBlock:
        params = b'["0x%x",false]' % number
        block = read_block(await self._call_source_first("eth_getBlockByNumber", params, source))
        if block is None or block.number != number:
            raise BlockUnavailable(f"no block {number}")
        return self._cache(block)

    async def prefetch(self, numbers: Sequence[int], source: Upstream | None = None) -> None:
        """Fetch several blocks concurrently into the cache. Failures are ignored: `by_hash` requests those blocks again."""
        left = iter(numbers)

        async def fetch() -> None:
            for number in left:
                async with self._fetches:
                    try:
                        await self.by_number(number, source)
                    except BlockUnavailable:
                        pass

        async with asyncio.TaskGroup() as group:
            for _ in range(min(CONCURRENCY, len(numbers))):
                group.create_task(fetch())

    # Logs

    async def logs_of(self, block: ChainBlock, source: Upstream | None = None) -> list[LogRecord]:
        """Return all logs of one block, in order."""
        params = b'[{"blockHash":"%b"}]' % block.hash.encode()
        result = await self._call_source_first(
            "eth_getLogs", params, source, least_head=block.number, doubt_empty=block.has_logs
        )
        return _checked(read_logs(result), block)

    async def receipt_logs_of(self, block: ChainBlock, source: Upstream | None = None) -> list[LogRecord]:
        """Return the same logs from the block's receipts. An upstream without the block fails instead of returning none."""
        params = b'["%b"]' % block.hash.encode()
        result = await self._call_source_first(
            "eth_getBlockReceipts", params, source, least_head=block.number, doubt_empty=block.has_logs
        )
        return _checked(read_receipts(result), block)

    async def logs_in(self, first: int, last: int, log_filter: LogFilter) -> bytes:
        """Return the logs of a block range, in order, as an upstream sent them. A range that upstreams refuse is not split:
        it raises BlockUnavailable."""
        query = {"fromBlock": hex(first), "toBlock": hex(last), **log_filter.params()}
        # An upstream that does not have the last block yet would silently leave it out.
        return await self.call(
            "eth_getLogs", msgspec.json.encode([query]), least_head=last, doubt_empty=True, is_piece=True
        )

    async def call(
        self, method: str, params: bytes, *, least_head: int = 0, doubt_empty: bool = False, is_piece: bool = False
    ) -> bytes:
        """Call the network. Raises BlockUnavailable on failure and, with `doubt_empty`, when an upstream below `least_head`
        returns an empty list."""
        policy, client = self._route.policies[method], ""
        if self._payer is not None:
            client = await self._payer.pay(self._route.state.price(policy, params), policy.tally)
        reply = call_upstream(
            self._route.dispatcher, policy, params, least_head=least_head, is_piece=is_piece, client=client
        )
        try:
            result = await reply.result()
        except (RpcError, Fault) as exc:
            raise BlockUnavailable(method) from exc
        if doubt_empty and result in _EMPTY and self._is_behind(reply, least_head):
            raise BlockUnavailable(f"empty reply to {method} from an upstream that is behind")
        return result

    def _is_behind(self, reply: PendingReply, least_head: int) -> bool:
        return reply.answered_by is not None and 0 < reply.answered_by.health.head < least_head

    async def _call_source_first(
        self, method: str, params: bytes, source: Upstream | None, *, least_head: int = 0, doubt_empty: bool = False
    ) -> bytes | None:
        """Call the source, since the upstream that announced a block has it, then any upstream that the route chooses. A source
        whose polls fail is not waited for: it may have announced the block on another connection than that of calls."""
        if source is not None and source.health.may_serve(method) and not source.health.silent:
            result = await result_of(Probe(source, method, params))
            if result is not None and result != jsonrpc.NULL:
                return result
        try:
            return await self.call(method, params, least_head=least_head, doubt_empty=doubt_empty)
        except BlockUnavailable:
            return None

    def _cache(self, block: ChainBlock) -> ChainBlock:
        self._cached[block.hash] = block
        return block


def read_block(result: bytes | None) -> ChainBlock | None:
    """Parse the block of a reply or a newHeads notification; None for anything else."""
    try:
        head = _head(result or jsonrpc.NULL)
        members = _members(result or jsonrpc.NULL)
    except jsonrpc.NOT_JSON:
        return None
    number, name, parent = _quantity(head.number), head.hash.lower(), head.parentHash.lower()
    # Hashes are copied into the params of our own calls, so only well-formed ones may pass.
    if number is None or not _HASH.fullmatch(name) or not _HASH.fullmatch(parent):
        return None
    for member in _NOT_IN_A_HEAD:
        members.pop(member, None)
    if bytes(members.get("baseFeePerGas", msgspec.Raw(jsonrpc.NULL))) == jsonrpc.NULL:
        members["baseFeePerGas"] = _NO_BASE_FEE
    has_logs = bool(head.logsBloom.strip("0x"))
    return ChainBlock(number, name, parent, msgspec.json.encode(members), has_logs)


def read_logs(result: bytes | None) -> list[LogRecord] | None:
    """Parse the logs of a reply; None for anything else."""
    try:
        logs, raws = _logs(result or jsonrpc.NULL), _raws(result or jsonrpc.NULL)
    except jsonrpc.NOT_JSON:
        return None
    numbers = [_quantity(log.blockNumber) for log in logs]
    return [
        LogRecord(log.address.lower(), [topic.lower() for topic in log.topics], log.blockHash.lower(), number, raw)
        for log, number, raw in zip(logs, numbers, raws, strict=True)
        if number is not None
    ]


def read_receipts(result: bytes | None) -> list[LogRecord] | None:
    """Parse the logs of a block's receipts; None for anything else."""
    try:
        by_receipt = [read_logs(bytes(receipt.logs)) for receipt in _receipts(result or jsonrpc.NULL)]
    except jsonrpc.NOT_JSON:
        return None
    return None if None in by_receipt else [log for logs in by_receipt for log in logs or ()]


def _checked(logs: list[LogRecord] | None, block: ChainBlock) -> list[LogRecord]:
    if logs is None or any(log.block_hash != block.hash for log in logs):
        raise BlockUnavailable(f"no logs of block {block.number}")
    return logs


def _quantity(text: str) -> int | None:
    return int(text, 16) if _NUMBER.fullmatch(text) else None


def _number_in(result: bytes | None) -> int:
    try:
        return _quantity(_text(result or jsonrpc.NULL)) or 0
    except jsonrpc.NOT_JSON:
        return 0
