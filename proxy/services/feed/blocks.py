"""Blocks and logs of one network, asked of its upstreams: the upstream that told of a block first, then any other.

Nothing is believed that does not fit: a block must have the hash that was asked for, a log must belong to its block.
Answers that do not come, or are no answer, raise `Unanswered`; whoever asked decides what that means.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from proxy.chains import families
from proxy.chains.evm.log_filter import LogFilter
from proxy.core import jsonrpc
from proxy.core.head_chain import ChainBlock
from proxy.errors import Fault
from proxy.services.rpc.calls import PendingReply, RpcError, ask_upstream
from proxy.services.rpc.networks import Route
from proxy.services.rpc.tracker import Probe
from proxy.wire.upstream import Upstream

# Blocks that are kept by hash: those of a few replays that walk side by side.
KEPT = 512
# How often a block is asked for before its source is thought to be wrong, and the pauses between.
ATTEMPTS = 4
PAUSE_S = 0.1
# Blocks that are asked for by number at a time.
AT_ONCE = 8
# What a block's answer has that a head's notice has not.
_NOT_IN_A_HEAD = ("transactions", "uncles", "withdrawals", "size", "totalDifficulty")
# A chain without a base fee burns none.
_NO_BASE_FEE = msgspec.Raw(b'"0x0"')
_NOTHING = (b"[]", b"[ ]")


class BlockUnavailable(Exception):
    """No upstream gave what was asked for."""


class LogRecord(msgspec.Struct, gc=False):
    """A log: what filters look at, and the whole as it came."""

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
    def __init__(self, route: Route) -> None:
        self._route = route
        self._kept: OrderedDict[str, ChainBlock] = OrderedDict()

    def __repr__(self) -> str:
        return f"<BlockSource of {self._route.network.id}, {len(self._kept)} kept>"

    @property
    def network(self) -> str:
        return self._route.network.id

    def clear(self) -> None:
        self._kept.clear()

    # Heads

    async def latest(self, upstream: Upstream) -> ChainBlock:
        """The head of one upstream."""
        found = read_block(await Probe(upstream, *families.HEAD_BLOCK_CALL["evm"]).ask())
        if found is None:
            raise BlockUnavailable("no head")
        return self._keep(found)

    async def newest(self) -> int:
        """The highest block that upstreams claim, each asked for itself: of many, the second highest."""
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(Probe(each, "eth_blockNumber").ask()) for each in self._route.upstreams]
        heads = sorted((_number_in(task.result()) for task in asked), reverse=True)
        return heads[1] if len(heads) > 2 else heads[0]

    async def by_hash(self, block_hash: str, source: Upstream | None = None) -> ChainBlock:
        for attempt in range(ATTEMPTS):
            if (kept := self._kept.get(block_hash)) is not None:
                return kept
            found = read_block(await self._ask("eth_getBlockByHash", b'["%b",false]' % block_hash.encode(), source))
            if found is not None and found.hash == block_hash:
                return self._keep(found)
            await asyncio.sleep(PAUSE_S * attempt)
        raise BlockUnavailable(f"no block {block_hash}")

    async def by_number(self, number: int, source: Upstream | None = None) -> ChainBlock:
        found = read_block(await self._ask("eth_getBlockByNumber", b'["0x%x",false]' % number, source))
        if found is None or found.number != number:
            raise BlockUnavailable(f"no block {number}")
        return self._keep(found)

    async def warm(self, numbers: Sequence[int], source: Upstream | None = None) -> None:
        """Ask for several at once, so that they are there when they are asked for by hash. Who fails is asked again then."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def ask(number: int) -> None:
            async with gate:
                try:
                    await self.by_number(number, source)
                except BlockUnavailable:
                    pass

        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(ask(number))

    # Logs

    async def logs_of(self, block: ChainBlock, source: Upstream | None = None) -> list[LogRecord]:
        """All logs of one block, in order."""
        params = b'[{"blockHash":"%b"}]' % block.hash.encode()
        found = read_logs(await self._ask("eth_getLogs", params, source, least_head=block.number, some=block.has_logs))
        return _checked(found, block)

    async def receipt_logs_of(self, block: ChainBlock, source: Upstream | None = None) -> list[LogRecord]:
        """The same, out of the block's receipts: whoever does not have it says so."""
        params, some = b'["%b"]' % block.hash.encode(), block.has_logs
        result = await self._ask("eth_getBlockReceipts", params, source, least_head=block.number, some=some)
        return _checked(read_receipts(result), block)

    async def logs_in(self, first: int, last: int, wanted: LogFilter) -> list[LogRecord]:
        """The logs of a range that match, in order."""
        query = {"fromBlock": hex(first), "toBlock": hex(last), **wanted.params()}
        # Who does not have the last block yet would leave it out without a word.
        found = read_logs(await self.ask("eth_getLogs", msgspec.json.encode([query]), least_head=last, some=True))
        if found is None:
            raise BlockUnavailable(f"no logs of blocks {first} to {last}")
        return [log for log in found if first <= log.block <= last and wanted.matches(log)]

    async def ask(self, method: str, params: bytes, *, least_head: int = 0, some: bool = False) -> bytes:
        """An ordinary question to the network; Unanswered where it failed. With `some`, "nothing" is no answer of one that has
        not come to the least head."""
        asked = ask_upstream(self._route, method, params, least_head=least_head)
        try:
            result = await asked.result()
        except (RpcError, Fault) as exc:
            raise BlockUnavailable(method) from exc
        if some and result in _NOTHING and self._is_behind(asked, least_head):
            raise BlockUnavailable(f"{method} of one that is behind")
        return result

    def _is_behind(self, asked: PendingReply, least_head: int) -> bool:
        by = asked.flight.answered_by if asked.flight is not None else -1
        return by >= 0 and 0 < self._route.upstreams[by].health.head < least_head

    async def _ask(
        self, method: str, params: bytes, source: Upstream | None, *, least_head: int = 0, some: bool = False
    ) -> bytes | None:
        """The source first: who told of a block has it. Then whoever the route chooses."""
        if source is not None and source.health.may_serve(method):
            result = await Probe(source, method, params).ask()
            if result is not None and result != jsonrpc.NULL:
                return result
        try:
            return await self.ask(method, params, least_head=least_head, some=some)
        except BlockUnavailable:
            return None

    def _keep(self, block: ChainBlock) -> ChainBlock:
        self._kept[block.hash] = block
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return block


def read_block(result: bytes | None) -> ChainBlock | None:
    """The block of an answer or a notice; None for anything else."""
    try:
        head = _head(result or jsonrpc.NULL)
        members = _members(result or jsonrpc.NULL)
    except jsonrpc.NOT_JSON:
        return None
    number, name, parent = _quantity(head.number), head.hash.lower(), head.parentHash.lower()
    # Hashes are written into our own questions: what is none must not get there.
    if number is None or not _HASH.fullmatch(name) or not _HASH.fullmatch(parent):
        return None
    for member in _NOT_IN_A_HEAD:
        members.pop(member, None)
    if bytes(members.get("baseFeePerGas", msgspec.Raw(jsonrpc.NULL))) == jsonrpc.NULL:
        members["baseFeePerGas"] = _NO_BASE_FEE
    has_logs = bool(head.logsBloom.strip("0x"))
    return ChainBlock(number, name, parent, msgspec.json.encode(members), has_logs)


def read_logs(result: bytes | None) -> list[LogRecord] | None:
    """The logs of an answer; None for anything else."""
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
    """The logs of a block's receipts; None for anything else."""
    try:
        found = [read_logs(bytes(receipt.logs)) for receipt in _receipts(result or jsonrpc.NULL)]
    except jsonrpc.NOT_JSON:
        return None
    return None if None in found else [log for logs in found for log in logs or ()]


def _checked(found: list[LogRecord] | None, block: ChainBlock) -> list[LogRecord]:
    if found is None or any(log.block_hash != block.hash for log in found):
        raise BlockUnavailable(f"no logs of block {block.number}")
    return found


def _quantity(text: str) -> int | None:
    return int(text, 16) if _NUMBER.fullmatch(text) else None


def _number_in(result: bytes | None) -> int:
    try:
        return _quantity(_text(result or jsonrpc.NULL)) or 0
    except jsonrpc.NOT_JSON:
        return 0
