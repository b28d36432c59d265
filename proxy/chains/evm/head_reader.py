"""Block numbers and hashes in results of EVM upstreams."""

from __future__ import annotations

import re

from proxy.chains.family import HeadReader
from proxy.chains.lookups import UpstreamCall

HEAD_BLOCK_CALL: UpstreamCall = ("eth_getBlockByNumber", b'["latest",false]')

_NUMBER = re.compile(rb'"number"\s*:\s*"0x([0-9a-fA-F]{1,16})"')
_BLOCK_NUMBER = re.compile(rb'"blockNumber"\s*:\s*"0x([0-9a-fA-F]{1,16})"')


# Development chains that make many blocks at once, as `hardhat_mine` does, report this for the parent of some of them.
UNKNOWN_PARENT = "0x" + "0" * 64


def read_number(result: bytes) -> int | None:
    """The number in a result of `eth_blockNumber`, or of a block in a result of `eth_getBlockByNumber`."""
    if result[:3] == b'"0x':
        try:
            return int(result[1:-1], 16)
        except ValueError:
            return None
    match = _NUMBER.search(result)
    return int(match[1], 16) if match else None


def write_number(number: int) -> bytes:
    return b'"0x%x"' % number


def newest_block(result: bytes) -> int | None:
    """The block of a transaction, a receipt or the last of several logs, which is the newest; or a block's own number."""
    at = result.rfind(b'"blockNumber"')
    match = _NUMBER.search(result) if at < 0 else _BLOCK_NUMBER.match(result, at)
    return None if match is None else int(match[1], 16)


HEAD = HeadReader(read_number=read_number, write_number=write_number, newest_block=newest_block)
