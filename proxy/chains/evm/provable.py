"""Which calls the chain's hashes can prove, as far as their params say.

A call that is refused here can never be proven, whichever upstream is asked and however often.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Longer ranges of logs are refused: each block has to be read.
MOST_LOG_BLOCKS = 200
TOO_MANY_BLOCKS = f"logs of at most {MOST_LOG_BLOCKS} blocks can be proven at a time: ask for a shorter range"
TAGS = ("earliest", "finalized", "latest", "safe")
# Characters of a value that an error repeats.
MOST_ECHOED = 40
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}", re.ASCII)
_HASH = re.compile(r"0x[0-9a-fA-F]{64}", re.ASCII)
_SLOT = re.compile(r"0x[0-9a-fA-F]{1,64}", re.ASCII)
_NUMBER = re.compile(r"0x[0-9a-fA-F]{1,16}", re.ASCII)
# Returns what is wrong with a param; empty if nothing is. A param that is missing is None.
Check = Callable[[Any], str]


def why_not(method: str, params: Any) -> str:
    """Why no hash can prove the reply to this call; empty if one may."""
    if not isinstance(params, list):
        return "its params must be an array"
    checks = _CHECKS[method]
    given = params + [None] * len(checks)
    return _first(check(param) for check, param in zip(checks, given, strict=False))


def _first(faults: Iterable[str]) -> str:
    return next(filter(None, faults), "")


def _form(pattern: re.Pattern[str], name: str) -> Check:
    def check(value: Any) -> str:
        return "" if isinstance(value, str) and pattern.fullmatch(value) else f"{_shown(value)} is not {name}"

    return check


def _shown(value: Any) -> str:
    return repr(value if value is None else str(value)[:MOST_ECHOED])


_address = _form(_ADDRESS, "an address")
_hash = _form(_HASH, "a hash of 32 bytes")
_slot = _form(_SLOT, "a storage slot")
_topic = _form(_HASH, "a topic of 32 bytes")


# Blocks


def _height(value: Any) -> str:
    """A block by its number or a tag."""
    if value == "pending":
        return "pending blocks cannot be proven"
    if value in TAGS or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        return ""
    return f"{_shown(value)} names no block that can be proven"


def _block(value: Any) -> str:
    """A block by number, tag or hash, or one of the objects of EIP-1898. Without any, it is the latest."""
    if isinstance(value, dict):
        return _hash(value["blockHash"]) if "blockHash" in value else _height(value.get("blockNumber"))
    return "" if value is None or not _hash(value) else _height(value)


# Logs


def _filter(value: Any) -> str:
    if not isinstance(value, dict):
        return "its params must be a filter object"
    return _range(value) or _first(map(_address, _each(value.get("address")))) or _topics(value.get("topics"))


def _range(wanted: Mapping[str, Any]) -> str:
    ends = [wanted.get(name) for name in ("fromBlock", "toBlock")]
    if wanted.get("blockHash") is not None:
        return "a filter with blockHash must have no fromBlock or toBlock" if any(ends) else _hash(wanted["blockHash"])
    first, last = ("latest" if end is None else end for end in ends)
    return _height(first) or _height(last) or _length(first, last)


def _length(first: str, last: str) -> str:
    """The range is measured later if the number of a tag's block is not known yet."""
    first = "0x0" if first == "earliest" else first
    if first in TAGS or last in TAGS:
        return ""
    return TOO_MANY_BLOCKS if int(last, 16) - int(first, 16) >= MOST_LOG_BLOCKS else ""


def _topics(value: Any) -> str:
    if value is not None and not isinstance(value, list):
        return "the topics of a filter must be an array"
    return _first(_topic(each) for place in value or () for each in _each(place) if each is not None)


def _each(value: Any) -> list[Any]:
    """The alternatives for an address or topic."""
    return value if isinstance(value, list) else [] if value is None else [value]


_CHECKS: Mapping[str, tuple[Check, ...]] = {
    "eth_getBlockByNumber": (_height,),
    "eth_getBlockByHash": (_hash,),
    "eth_getTransactionByHash": (_hash,),
    "eth_getTransactionReceipt": (_hash,),
    "eth_getBlockReceipts": (_block,),
    "eth_getLogs": (_filter,),
    "eth_getBalance": (_address, _block),
    "eth_getTransactionCount": (_address, _block),
    "eth_getCode": (_address, _block),
    "eth_getStorageAt": (_address, _slot, _block),
}
