"""Proves replies of an upstream by the chain's own hashes, starting from a block that enough upstreams agree on.

Each method that can be proven has one function here. It asks one upstream for the reply and for what proves it, and raises
`Refuted` if they do not fit. The libraries for it are imported on first use: most services never need them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.chains.evm.provable import MOST_LOG_BLOCKS, TOO_MANY_BLOCKS, why_not
from proxy.chains.family import NeverProvable, ProofSource, Refuted, Unprovable

# Blocks of a range of logs whose receipts are read: their tries are built in Python.
MOST_RECEIPT_BLOCKS = 20
TOO_MANY_RECEIPTS = (
    f"logs in more than {MOST_RECEIPT_BLOCKS} blocks cannot be proven at a time: ask for a shorter range"
)
# Errors of the checks, if a reply does not have the form that they expect. The params were checked before.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
Prove = Callable[[ProofSource, Sequence[Any]], Awaitable[Any]]


class EvmProver:
    def covers(self, method: str) -> bool:
        return method in _PROVERS

    def needs(self, method: str) -> Sequence[str]:
        return _PROVERS[method][1]

    def why_not(self, method: str, params: Any) -> str:
        return why_not(method, params)

    async def prove(self, method: str, params: Sequence[Any], source: ProofSource) -> bytes:
        """The proven result as JSON."""
        from proxy.chains.evm.block_proofs import NotProven

        try:
            return msgspec.json.encode(await _PROVERS[method][0](source, params))
        except NotProven as exc:
            raise Refuted(str(exc)) from None
        except _MALFORMED as exc:
            raise Unprovable(f"a reply does not have the usual form ({type(exc).__name__})") from None


# Blocks


async def _block(source: ProofSource, ref: Any, *, full: bool) -> dict[str, Any]:
    """A block on the chain that enough upstreams agree on, with its header checked."""
    from proxy.chains.evm import block_proofs

    if isinstance(ref, Mapping):  # EIP-1898
        ref = ref.get("blockHash") or ref.get("blockNumber")
    is_hash = isinstance(ref, str) and len(ref) == 66
    if isinstance(ref, str) and not ref.startswith("0x"):
        ref = await _resolved(source, ref)
    result = await source.ask("eth_getBlockByHash" if is_hash else "eth_getBlockByNumber", [ref, full])
    if result is None:
        raise Unprovable("the upstream does not have the block")
    block: dict[str, Any] = dict(result)
    digest = await source.off_loop(block_proofs.check_header, block)
    if (is_hash and digest != block_proofs.raw(ref)) or (not is_hash and int(block["number"], 16) != int(ref, 16)):
        raise Refuted("the upstream returned another block")
    if not await source.confirm(hex(int(block["number"], 16)), block["hash"]):
        raise Refuted("other upstreams have another block at this height")
    return block


async def _resolved(source: ProofSource, tag: str) -> str:
    """The number of the block that a tag means. `latest` is the newest that enough upstreams have; they must agree about
    others, or one of them could prove the state of any old block."""
    if tag == "latest":
        return hex(source.head)
    if tag == "earliest":
        return "0x0"
    block = await source.ask("eth_getBlockByNumber", [tag, False])
    if not await source.confirm(tag, block["hash"]):
        raise Unprovable(f"the upstreams have different {tag} blocks at the moment")
    return str(block["number"])


async def _prove_block(source: ProofSource, params: Sequence[Any]) -> Any:
    from proxy.chains.evm import block_proofs

    wants_full = len(params) > 1 and params[1] is True
    block = await _block(source, params[0], full=True)
    transactions = await source.off_loop(block_proofs.check_transactions, block)
    return block_proofs.only_proven(block, transactions if wants_full else [each["hash"] for each in transactions])


# Transactions and receipts


async def _prove_transaction(source: ProofSource, params: Sequence[Any]) -> Any:
    """A transaction in the block that it names. One that is not mined, or unknown, cannot be proven."""
    from proxy.chains.evm import block_proofs

    transaction = await source.ask("eth_getTransactionByHash", [params[0]])
    if not transaction or not transaction.get("blockHash"):
        raise Unprovable("only mined transactions can be proven")
    block = await _block(source, transaction["blockHash"], full=True)
    transactions = await source.off_loop(block_proofs.check_transactions, block)
    return _only(transactions, "hash", params[0])


async def _prove_receipt(source: ProofSource, params: Sequence[Any]) -> Any:
    receipt = await source.ask("eth_getTransactionReceipt", [params[0]])
    if not receipt:
        raise Unprovable("only receipts of mined transactions can be proven")
    block = await _block(source, receipt["blockHash"], full=True)
    return _only(await _receipts(source, block), "transactionHash", params[0])


async def _prove_receipts(source: ProofSource, params: Sequence[Any]) -> Any:
    return await _receipts(source, await _block(source, _at(params, 0), full=True))


async def _receipts(source: ProofSource, block: Mapping[str, Any]) -> list[Any]:
    """All receipts of a block, checked."""
    from proxy.chains.evm import block_proofs

    receipts = await source.ask_or_none("eth_getBlockReceipts", [block["hash"]])
    if receipts is None:  # Some nodes do not have the method.
        hashes = [each["hash"] for each in block["transactions"]]
        receipts = [await source.ask("eth_getTransactionReceipt", [each]) for each in hashes]
    return await source.off_loop(block_proofs.check_receipts, block, receipts)


def _only(entries: Sequence[Mapping[str, Any]], name: str, wanted: str) -> Any:
    for each in entries:
        if each[name].lower() == wanted.lower():
            return each
    raise Refuted("the transaction is not in the block that the upstream names")


# Logs


async def _prove_logs(source: ProofSource, params: Sequence[Any]) -> Any:
    """The logs of a range, computed from the receipts of each block whose bloom filter allows for one.

    The last block is confirmed; each earlier one by the parent hash of the next.
    """
    wanted = params[0]
    if wanted.get("blockHash"):
        return await _logs_of(source, await _block(source, wanted["blockHash"], full=False), wanted)
    first, last = [await _number(source, wanted.get(name) or "latest") for name in ("fromBlock", "toBlock")]
    if last - first >= MOST_LOG_BLOCKS:
        raise NeverProvable(TOO_MANY_BLOCKS)
    logs: list[Any] = []
    read = 0
    header = await _block(source, hex(last), full=False) if last >= first else None
    while header is not None:
        if _may_match(wanted, header["logsBloom"]):
            read += 1
            if read > MOST_RECEIPT_BLOCKS:
                raise NeverProvable(TOO_MANY_RECEIPTS)
            logs = await _logs_of(source, header, wanted) + logs
        above = int(header["number"], 16) > first
        header = await _linked(source, header["parentHash"], full=False) if above else None
    return logs


async def _linked(source: ProofSource, block_hash: str, *, full: bool) -> dict[str, Any]:
    """A block whose hash is known to be on the chain."""
    from proxy.chains.evm import block_proofs

    block: dict[str, Any] = dict(await source.ask("eth_getBlockByHash", [block_hash, full]) or {})
    if await source.off_loop(block_proofs.check_header, block) != block_proofs.raw(block_hash):
        raise Refuted("the upstream returned another block")
    return block


async def _number(source: ProofSource, ref: str) -> int:
    return int(ref if ref.startswith("0x") else await _resolved(source, ref), 16)


async def _logs_of(source: ProofSource, block: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Any]:
    whole = await _linked(source, block["hash"], full=True)
    logs = [log for receipt in await _receipts(source, whole) for log in receipt["logs"]]
    return [log for log in logs if _matches(wanted, log)]


def _alternatives(value: Any) -> list[str]:
    """An address or topic of a filter as a list; empty means any."""
    if isinstance(value, str):
        return [value.lower()]
    return [] if value is None or None in value else [each.lower() for each in value]


def _matches(wanted: Mapping[str, Any], log: Mapping[str, Any]) -> bool:
    addresses, topics = _alternatives(wanted.get("address")), wanted.get("topics") or []
    if addresses and log["address"].lower() not in addresses:
        return False
    if len(topics) > len(log["topics"]):
        return False
    pairs = zip(map(_alternatives, topics), log["topics"], strict=False)
    return all(not allowed or topic.lower() in allowed for allowed, topic in pairs)


def _may_match(wanted: Mapping[str, Any], bloom: str) -> bool:
    from proxy.chains.evm.block_proofs import may_contain, raw

    bits = raw(bloom)
    groups = [_alternatives(wanted.get("address")), *map(_alternatives, wanted.get("topics") or [])]
    return all(any(may_contain(bits, raw(each)) for each in group) for group in groups if group)


# State


async def _account(source: ProofSource, address: str, ref: Any, slots: Sequence[str] = ()) -> tuple[Any, str]:
    """The proven account, with proofs of these slots, and the block as a number."""
    from proxy.chains.evm import block_proofs, state_proofs

    block = await _block(source, ref, full=False)
    proof = await source.ask("eth_getProof", [address, list(slots), block["number"]])
    await source.off_loop(
        state_proofs.check_account, proof, block_proofs.raw(address), block_proofs.raw(block["stateRoot"])
    )
    return proof, block["number"]


def _at(params: Sequence[Any], place: int) -> Any:
    return params[place] if len(params) > place and params[place] is not None else "latest"


async def _prove_balance(source: ProofSource, params: Sequence[Any]) -> Any:
    return hex(int((await _account(source, params[0], _at(params, 1)))[0]["balance"], 16))


async def _prove_nonce(source: ProofSource, params: Sequence[Any]) -> Any:
    return hex(int((await _account(source, params[0], _at(params, 1)))[0]["nonce"], 16))


async def _prove_code(source: ProofSource, params: Sequence[Any]) -> Any:
    from proxy.chains.evm import block_proofs, state_proofs

    proof, number = await _account(source, params[0], _at(params, 1))
    code = await source.ask("eth_getCode", [params[0], number])
    expected = block_proofs.raw(proof["codeHash"])
    if block_proofs.keccak(block_proofs.raw(code)) != (expected if any(expected) else state_proofs.NO_CODE):
        raise Refuted("the code differs from its hash in the state")
    return code


async def _prove_slot(source: ProofSource, params: Sequence[Any]) -> Any:
    from proxy.chains.evm import state_proofs

    slot = int(params[1], 16)
    proof, _ = await _account(source, params[0], _at(params, 2), [f"0x{slot:064x}"])
    return f"0x{state_proofs.check_slot(proof, slot):064x}"


# How each method is proven, and the methods that this always takes.
_PROVERS: Mapping[str, tuple[Prove, Sequence[str]]] = {
    "eth_getBlockByNumber": (_prove_block, ("eth_getBlockByNumber",)),
    "eth_getBlockByHash": (_prove_block, ("eth_getBlockByHash",)),
    "eth_getTransactionByHash": (_prove_transaction, ("eth_getTransactionByHash", "eth_getBlockByHash")),
    "eth_getTransactionReceipt": (_prove_receipt, ("eth_getTransactionReceipt", "eth_getBlockByHash")),
    "eth_getBlockReceipts": (_prove_receipts, ("eth_getBlockByNumber",)),
    "eth_getLogs": (_prove_logs, ("eth_getBlockByNumber", "eth_getBlockByHash")),
    "eth_getBalance": (_prove_balance, ("eth_getProof", "eth_getBlockByNumber")),
    "eth_getTransactionCount": (_prove_nonce, ("eth_getProof", "eth_getBlockByNumber")),
    "eth_getCode": (_prove_code, ("eth_getProof", "eth_getCode", "eth_getBlockByNumber")),
    "eth_getStorageAt": (_prove_slot, ("eth_getProof", "eth_getBlockByNumber")),
}
