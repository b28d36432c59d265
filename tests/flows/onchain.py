"""Expected values, read from the development chain by web3.py and not by the code under test."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any, TypeVar

from eth_abi import decode
from web3 import HTTPProvider, Web3
from web3.exceptions import BadFunctionCallOutput, ContractLogicError
from web3.types import BlockIdentifier

T = TypeVar("T")
EXACT = Context(prec=400)
TOPIC = {
    "transfer": "Transfer(address,address,uint256)",
    "single": "TransferSingle(address,address,address,uint256,uint256)",
    "batch": "TransferBatch(address,address,address,uint256[],uint256[])",
}
ZERO_ADDRESS = "0x" + "00" * 20


def function(name: str, outputs: list[str], inputs: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "stateMutability": "view",
        "inputs": [{"name": "", "type": each} for each in inputs],
        "outputs": [{"name": "", "type": each} for each in outputs],
    }


ABI = [
    function("balanceOf", ["uint256"], ("address",)),
    function("totalSupply", ["uint256"]),
    function("decimals", ["uint8"]),
    function("name", ["string"]),
    function("symbol", ["string"]),
    function("supportsInterface", ["bool"], ("bytes4",)),
    function("latestRoundData", ["uint80", "int256", "uint256", "uint256", "uint80"]),
    {**function("transfer", ["bool"], ("address", "uint256")), "stateMutability": "nonpayable"},
    {**function("rebase", [], ("uint256",)), "stateMutability": "nonpayable"},
    {**function("mint", [], ("address", "uint256")), "stateMutability": "nonpayable"},
]
OLD_ABI = [function("name", ["bytes32"]), function("symbol", ["bytes32"])]


def formatted(raw: int, decimals: int) -> str:
    """The amount as decimal text, without exponent and trailing zeros, by the decimal module."""
    text = format(EXACT.scaleb(Decimal(raw), -decimals), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


class OnChain:
    """Reads at a block. web3 is synchronous: use `run` to read in a thread."""

    def __init__(self, url: str) -> None:
        self.web3 = Web3(HTTPProvider(url))

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    def read(self, contract: str, name: str, *values: Any, block: BlockIdentifier = "latest", abi: Any = None) -> Any:
        """The result, or None if the contract reverts or returns data of another type."""
        found = self.web3.eth.contract(Web3.to_checksum_address(contract), abi=abi or ABI)
        try:
            return found.functions[name](*values).call(block_identifier=block)
        except (ContractLogicError, BadFunctionCallOutput, ValueError, OverflowError):
            return None

    def text(self, contract: str, name: str, block: BlockIdentifier = "latest") -> str | None:
        """The result as a string, also if the contract returns bytes32."""
        found = self.read(contract, name, block=block)
        if found is None and (word := self.read(contract, name, block=block, abi=OLD_ABI)) is not None:
            found = bytes(word).rstrip(b"\0").decode()
        return None if found is None else str(found)

    def send(self, sender: str, contract: str, name: str, *values: Any) -> int:
        """Send a transaction; return the block it was mined in."""
        found = self.web3.eth.contract(Web3.to_checksum_address(contract), abi=ABI)
        sent = found.functions[name](*values).transact({"from": sender})
        return int(self.web3.eth.wait_for_transaction_receipt(sent)["blockNumber"])

    def price(self, feed: str) -> Decimal:
        answer, decimals = self.read(feed, "latestRoundData")[1], self.read(feed, "decimals")
        return EXACT.scaleb(Decimal(answer), -decimals)

    def owners(self, contract: str, block: int) -> dict[tuple[str, int], int]:
        """Amounts by (owner, token id), summed up from the contract's logs."""
        held: defaultdict[tuple[str, int], int] = defaultdict(int)
        for kind, topic in TOPIC.items():
            wanted = {"address": contract, "fromBlock": 0, "toBlock": block, "topics": [Web3.keccak(text=topic)]}
            for log in self.web3.eth.get_logs(wanted):  # type: ignore[arg-type]
                for source, target, token_id, amount in _moves(kind, log):
                    held[source, token_id] -= amount
                    held[target, token_id] += amount
        return {holding: count for holding, count in held.items() if count > 0 and holding[0] != ZERO_ADDRESS}


def _moves(kind: str, log: Any) -> list[tuple[str, str, int, int]]:
    topics = [bytes(topic) for topic in log["topics"]]
    addresses = [Web3.to_checksum_address(topic[12:]) for topic in topics[1:]]
    if kind == "transfer":
        return [(addresses[0], addresses[1], int.from_bytes(topics[3], "big"), 1)] if len(topics) == 4 else []
    data = bytes(log["data"])
    if kind == "single":
        token_id, amount = decode(["uint256", "uint256"], data)
        return [(addresses[1], addresses[2], token_id, amount)]
    ids, amounts = decode(["uint256[]", "uint256[]"], data)
    return [(addresses[1], addresses[2], one, other) for one, other in zip(ids, amounts, strict=True)]
