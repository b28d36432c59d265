"""A sample of each event type, for webhook tests.

The samples describe nothing that happened. They are built by the same functions as real events, so their shape is the same.
"""

from __future__ import annotations

from typing import Any

from proxy.chains.evm import payloads
from proxy.chains.evm.facts import TRANSFER, ChainLog, Header
from proxy.chains.evm.matching import InternalTransfer, Match, MatchTransaction
from proxy.chains.evm.payloads import EventContext, EventToken
from proxy.chains.evm.watch_index import KINDS, Direction, Watcher, WatchFilter, WatchKind
from proxy.core.holdings import FUNGIBLE, Transfer

_SENDER, _RECIPIENT, _CONTRACT = bytes.fromhex("11" * 20), bytes.fromhex("22" * 20), bytes.fromhex("33" * 20)
_HASH, _BLOCK_HASH, _PARENT = "0x" + "aa" * 32, "0x" + "bb" * 32, "0x" + "cc" * 32
_COIN = 10**18
_TX = MatchTransaction(_HASH, 0, _SENDER, _RECIPIENT, _COIN, 7, b"")
_TOKEN = EventToken("TEST", 6)
_NFT: dict[str, Any] = {
    "name": "Test #1",
    "description": None,
    "image_url": None,
    "image_gateway_url": None,
    "traits": [],
}
_RECEIPT = {"status": "0x1", "gasUsed": "0x5208", "contractAddress": None}


def sample_of(event_type: str, *, chain: str, symbol: str, decimals: int, block: int, time: str) -> dict[str, Any]:
    """The data of an event of this type. `symbol` and `decimals` are of the network's own coin."""
    kind = KINDS[event_type]
    watcher = Watcher("", event_type, WatchFilter(), listed=False)
    context = EventContext(chain, symbol, decimals, None if kind == "pending" else block, _BLOCK_HASH, time)
    header = Header(hex(block), _BLOCK_HASH, _PARENT, "0x0", gas_used="0x5208")
    direction: Direction | None = "incoming" if kind in ("activity", "internal", "pending") else None
    payload = payloads.payload_of(
        Match(watcher, _fact(kind, block), direction), context, header=header, tokens={_CONTRACT: _TOKEN}
    )
    whole = payloads.completed(
        event_type,
        payload.data,
        receipt=_RECEIPT if "transaction" in payload.lacks else None,
        nft=_NFT if "nft" in payload.lacks else None,
    )
    assert whole is not None
    return whole


def _fact(kind: WatchKind, block: int) -> MatchTransaction | Transfer | InternalTransfer | ChainLog | None:
    match kind:
        case "token":
            return Transfer(FUNGIBLE, _CONTRACT, _SENDER, _RECIPIENT, 1_500_000, 0, _HASH, 3)
        case "nft":
            return Transfer(721, _CONTRACT, _SENDER, _RECIPIENT, 1, 1, _HASH, 3)
        case "internal":
            return InternalTransfer(_HASH, (0, 1), "call", _SENDER, _RECIPIENT, _COIN)
        case "log":
            words = ["0x" + each.rjust(32, b"\0").hex() for each in (_SENDER, _RECIPIENT)]
            topics, data = [TRANSFER, *words], "0x" + f"{1_500_000:064x}"
            return ChainLog("0x" + _CONTRACT.hex(), topics, hex(block), _BLOCK_HASH, _HASH, "0x3", data)
        case "block":
            return None
        case _:
            return _TX
