"""Block numbers and hashes in results of EVM upstreams."""

from __future__ import annotations

import re

import msgspec

from proxy.chains.family import HeadReader, ReportedBlock, UpstreamCall

HEAD_BLOCK_CALL: UpstreamCall = ("eth_getBlockByNumber", b'["latest",false]')

_NUMBER = re.compile(rb'"number"\s*:\s*"0x([0-9a-fA-F]{1,16})"')
_BLOCK_NUMBER = re.compile(rb'"blockNumber"\s*:\s*"0x([0-9a-fA-F]{1,16})"')


class _Block(msgspec.Struct, gc=False):
    number: str
    hash: str
    parentHash: str = ""


_block = msgspec.json.Decoder(_Block).decode


# Development chains that make many blocks at once, as `hardhat_mine` does, report this for the parent of some of them.
UNKNOWN_PARENT = "0x" + "0" * 64


def read_number(result: bytes) -> int | None:
    """The number in a result of `eth_blockNumber`, or of a block in a result of `eth_getBlockByNumber`."""
    if result[:3] == b'"0x':
        try:
            return int(result[1:-1], 16)
        except ValueError:
            return None
    found = _NUMBER.search(result)
    return int(found[1], 16) if found else None


def write_number(number: int) -> bytes:
    return b'"0x%x"' % number


def read_block(result: bytes) -> ReportedBlock | None:
    """The number, hash and parent hash of a block. The parent hash is empty if the upstream does not know it."""
    try:
        found = _block(result)
        return int(found.number, 16), found.hash, "" if found.parentHash == UNKNOWN_PARENT else found.parentHash
    except (msgspec.DecodeError, ValueError):
        return None


def block_call(number: int) -> UpstreamCall:
    return "eth_getBlockByNumber", b'["0x%x",false]' % number


def read_chain_id(result: bytes) -> str:
    number = read_number(result)
    return "" if number is None else str(number)


def read_genesis(result: bytes) -> bytes:
    """The first block's hash; the whole result if it is not a block."""
    block = read_block(result)
    return result if block is None else block[1].encode()


def newest_block(result: bytes) -> int | None:
    """The block of a transaction, a receipt or the last of several logs, which is the newest; or a block's own number."""
    at = result.rfind(b'"blockNumber"')
    found = _NUMBER.search(result) if at < 0 else _BLOCK_NUMBER.match(result, at)
    return None if found is None else int(found[1], 16)


HEAD = HeadReader(
    number_call=("eth_blockNumber", b"[]"),
    read_number=read_number,
    write_number=write_number,
    genesis_call=("eth_getBlockByNumber", b'["0x0",false]'),
    read_genesis=read_genesis,
    chain_call=("eth_chainId", b"[]"),
    archive_call=("eth_getBalance", b'["0x0000000000000000000000000000000000000000","0x1"]'),
    read_chain=read_chain_id,
    head_block_call=HEAD_BLOCK_CALL,
    final_block_call=("eth_getBlockByNumber", b'["finalized",false]'),
    block_call=block_call,
    read_block=read_block,
    subscribe_call=("eth_subscribe", b'["newHeads"]'),
    newest_block=newest_block,
)
