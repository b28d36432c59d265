"""Checks of blocks, transactions and receipts against the hashes of their block header.

A header's fields, in their order, hash to the block's hash. The header contains the roots of two tries: of the transactions and
of the receipts, each by index. So one block hash that is trusted proves everything here. Members of a reply that no hash covers
are computed from those that are, and compared.

Members that nothing here covers, such as `size`, are left out of a proven reply (`only_proven`).

Encodings: the yellow paper, EIP-2718 (typed transactions and receipts), EIP-2930, EIP-1559, EIP-4844, EIP-7702; deposits of
the OP stack (type 0x7e).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import coincurve
import rlp
import sha3
from trie import HexaryTrie

RpcObject = Mapping[str, Any]
EMPTY_TRIE = bytes.fromhex("56e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421")
# Fields of a header. Those after `nonce` were added by later forks, one after the other.
_HEADER = (
    *("parentHash", "sha3Uncles", "miner", "stateRoot", "transactionsRoot", "receiptsRoot", "logsBloom"),
    *("#difficulty", "#number", "#gasLimit", "#gasUsed", "#timestamp", "extraData", "mixHash", "nonce"),
)
_LATER = (
    *("#baseFeePerGas", "withdrawalsRoot", "#blobGasUsed", "#excessBlobGas", "parentBeaconBlockRoot", "requestsHash"),
)
_SIGNED = ("#v", "#r", "#s")
_PRICE = ("#chainId", "#nonce", "#maxPriorityFeePerGas", "#maxFeePerGas", "#gas", "to", "#value", "input", "accessList")
# Fields of a transaction by type, without its signature. "#" marks a number, "+" one that may be missing, "?" a flag.
_TRANSACTIONS: Mapping[int, tuple[str, ...]] = {
    0x00: ("#nonce", "#gasPrice", "#gas", "to", "#value", "input"),
    0x01: ("#chainId", "#nonce", "#gasPrice", "#gas", "to", "#value", "input", "accessList"),
    0x02: _PRICE,
    0x03: (*_PRICE, "#maxFeePerBlobGas", "blobVersionedHashes"),
    0x04: (*_PRICE, "authorizationList"),
    0x7E: ("sourceHash", "from", "to", "+mint", "#value", "#gas", "?isSystemTx", "input"),
}
DEPOSIT = 0x7E
ADDRESS_BYTES, ROOT_BYTES = 20, 32
# Members of a transaction that follow from hashed ones, and are compared with them.
_DERIVED = ("v", "r", "s", "yParity", "chainId", "gasPrice")
_PLACED = ("blockHash", "blockNumber", "transactionIndex")
_LOG = frozenset(("address", "topics", "data", "logIndex", "transactionHash", "removed", *_PLACED))
_RECEIPT = frozenset(
    (
        *("cumulativeGasUsed", "logsBloom", "logs", "type", "transactionHash", "from", "to", *_PLACED),
        *("gasUsed", "effectiveGasPrice"),
    )
)
_QUANTITY = re.compile(r"0x[0-9a-fA-F]{1,64}", re.ASCII)
_EMPTY_LIST = "0x1dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347"


class NotProven(Exception):
    """The reply contradicts a hash, or nothing proves it. The text says which part."""


def keccak(data: bytes) -> bytes:
    return bytes(sha3.keccak_256(data).digest())


def raw(text: str | None) -> bytes:
    """The bytes of a text in hex. A form that other programs may read differently raises ValueError."""
    if text is None:
        return b""
    decoded = bytes.fromhex(text[2:])
    # `fromhex` skips spaces.
    if text[:2] != "0x" or len(text) != 2 + 2 * len(decoded):
        raise ValueError(text[:10])
    return decoded


def number(text: str) -> int:
    """A number in hex. Raises ValueError for signs, spaces and underscores, which `int` accepts."""
    if not _QUANTITY.fullmatch(text):
        raise ValueError(text[:10])
    return int(text, 16)


def _optional(text: str | None) -> int:
    return 0 if text is None else number(text)


def _field(source: RpcObject, name: str) -> Any:
    """One field as RLP encodes it."""
    if name[0] == "#":
        return _minimal(number(source[name[1:]]))
    if name[0] == "+":
        return _minimal(_optional(source.get(name[1:])))
    if name[0] == "?":
        return b"\x01" if source.get(name[1:]) else b""
    return _ENCODED.get(name, raw)(source.get(name))


def _minimal(value: int) -> bytes:
    return value.to_bytes((value.bit_length() + 7) // 8, "big")


def _recipient(value: str | None) -> bytes:
    """An address, or nothing if a contract is created."""
    address = raw(value)
    if value is not None and len(address) != ADDRESS_BYTES:
        raise ValueError(value[:10])
    return address


def _access_list(value: Any) -> list[Any]:
    return [[raw(each["address"]), [raw(key) for key in each["storageKeys"]]] for each in value or ()]


def _authorizations(value: Any) -> list[Any]:
    names = ("#chainId", "address", "#nonce", "#yParity", "#r", "#s")
    return [[_field(each, name) for name in names] for each in value or ()]


_ENCODED: Mapping[str, Callable[[Any], Any]] = {
    "accessList": _access_list,
    "authorizationList": _authorizations,
    "to": _recipient,
    "blobVersionedHashes": lambda value: [raw(each) for each in value or ()],
}


# Proven replies


def _kept(source: RpcObject, names: Iterable[str]) -> dict[str, Any]:
    return {name: source[name] for name in names if name in source}


def only_proven(block: RpcObject, transactions: Sequence[Any]) -> dict[str, Any]:
    """The members of a block that its header covers, with these transactions, which were checked."""
    members = {**_kept(block, map(_name, _header_of(block))), "hash": block["hash"], "transactions": list(transactions)}
    if block["sha3Uncles"].lower() == _EMPTY_LIST:
        members["uncles"] = []
    return members


def only_proven_transaction(transaction: RpcObject) -> dict[str, Any]:
    kind = _kind(transaction)
    names = [*map(_name, _TRANSACTIONS[kind]), *(() if kind == DEPOSIT else _DERIVED)]
    return _kept(transaction, [*names, "type", "hash", "from", *_PLACED])


def only_proven_receipt(receipt: RpcObject) -> dict[str, Any]:
    hashed = map(_name, (_outcome(receipt), *_deposit_of(receipt)))
    names = [*_RECEIPT, *hashed, *(() if _is_deposit(receipt) else ("contractAddress",))]
    return {**_kept(receipt, names), "logs": [_kept(log, _LOG) for log in receipt["logs"]]}


def _name(field: str) -> str:
    return field.lstrip("#+?")


def _kind(source: RpcObject) -> int:
    """The type of a transaction or a receipt."""
    return _optional(source.get("type"))


# Headers


def _header_of(block: RpcObject) -> list[str]:
    """The fields of this block's header. The first one that is missing was added by a later fork, and so were all after it."""
    later = takewhile(lambda name: block.get(_name(name)) is not None, _LATER)
    return [*_HEADER, *later]


def check_header(block: RpcObject) -> bytes:
    """Check that the fields of the header hash to the block's hash; return it."""
    digest = keccak(rlp.encode([_field(block, name) for name in _header_of(block)]))
    if digest != raw(block.get("hash")):
        raise NotProven("the header does not hash to the block's hash")
    return digest


# Transactions


def check_transactions(block: RpcObject) -> list[RpcObject]:
    """Check the full transactions of a block against the root in its header; return them."""
    transactions: list[RpcObject] = list(block.get("transactions") or ())
    if any(not isinstance(each, Mapping) for each in transactions):
        raise NotProven("the block has no full transactions")
    encoded = [encode_transaction(each) for each in transactions]
    if root_of(encoded) != raw(block["transactionsRoot"]):
        raise NotProven("the transactions do not match the header's root")
    for index, (each, data) in enumerate(zip(transactions, encoded, strict=True)):
        _check_place(each, block, index)
        if keccak(data) != raw(each["hash"]):
            raise NotProven(f"transaction {index} does not hash to its hash")
        check_sender(each)
        _check_derived(each, block)
    return [only_proven_transaction(each) for each in transactions]


def _check_derived(transaction: RpcObject, block: RpcObject) -> None:
    """Check the members that are not hashed but follow from those that are."""
    kind = _kind(transaction)
    if kind == DEPOSIT:
        return
    v, parity = number(transaction["v"]), transaction.get("yParity")
    if parity is not None and number(parity) != (_legacy_parity(v) if kind == 0 else v):
        raise NotProven("yParity of a transaction is wrong")
    if kind == 0 and transaction.get("chainId") is not None and number(transaction["chainId"]) != max(0, (v - 35) // 2):
        raise NotProven("chainId of a transaction is wrong")
    if transaction.get("gasPrice") is not None and number(transaction["gasPrice"]) != price_of(transaction, block):
        raise NotProven("gasPrice of a transaction is wrong")


def price_of(transaction: RpcObject, block: RpcObject) -> int:
    """The price of gas that a transaction paid (EIP-1559)."""
    if transaction.get("maxFeePerGas") is None:
        return number(transaction["gasPrice"])
    base = _optional(block.get("baseFeePerGas"))
    return min(number(transaction["maxFeePerGas"]), base + number(transaction["maxPriorityFeePerGas"]))


def _legacy_parity(v: int) -> int:
    return (v - 35) % 2 if v >= 35 else v - 27


def encode_transaction(transaction: RpcObject) -> bytes:
    kind = _kind(transaction)
    if kind not in _TRANSACTIONS:
        raise NotProven(f"transactions of type {kind:#x} are not supported")
    fields = [_field(transaction, name) for name in _TRANSACTIONS[kind]]
    if kind == DEPOSIT:
        return bytes([kind]) + bytes(rlp.encode(fields))
    if kind == 0:
        return bytes(rlp.encode([*fields, *(_field(transaction, name) for name in _SIGNED)]))
    signature = [_minimal(_parity(transaction)), _field(transaction, "#r"), _field(transaction, "#s")]
    return bytes([kind]) + bytes(rlp.encode([*fields, *signature]))


def _parity(transaction: RpcObject) -> int:
    """The parity of the signature's point. Some nodes have it in `yParity`, some in `v`."""
    return number(transaction["yParity"] if transaction.get("yParity") is not None else transaction["v"])


def check_sender(transaction: RpcObject) -> None:
    """Recover the sender from the signature and compare it. A deposit has none: its sender is a field that is hashed."""
    kind = _kind(transaction)
    if kind == DEPOSIT:
        return
    fields = [_field(transaction, name) for name in _TRANSACTIONS[kind]]
    if kind == 0:
        v = number(transaction["v"])
        parity = _legacy_parity(v)
        if v >= 35:  # EIP-155
            fields += [_minimal((v - 35) // 2), b"", b""]
        signed = rlp.encode(fields)
    else:
        parity, signed = _parity(transaction), bytes([kind]) + rlp.encode(fields)
    signature = b"".join(number(transaction[name]).to_bytes(32, "big") for name in ("r", "s")) + bytes([parity])
    try:
        key = coincurve.PublicKey.from_signature_and_message(signature, keccak(signed), hasher=None)
    except ValueError:
        raise NotProven("the signature of a transaction is not valid") from None
    if keccak(key.format(compressed=False)[1:])[12:] != raw(transaction["from"]):
        raise NotProven("the sender of a transaction did not sign it")


# Receipts


def check_receipts(block: RpcObject, receipts: Sequence[RpcObject]) -> list[dict[str, Any]]:
    """Check all receipts of a block, with its full transactions, against the root in its header; return them."""
    transactions = check_transactions(block)
    if len(receipts) != len(transactions):
        raise NotProven("the block does not have that many receipts")
    if root_of([encode_receipt(each) for each in receipts]) != raw(block["receiptsRoot"]):
        raise NotProven("the receipts do not match the header's root")
    used, logs = 0, 0
    for index, (receipt, transaction) in enumerate(zip(receipts, transactions, strict=True)):
        _check_place(receipt, block, index, hash_name="transactionHash", of=transaction)
        before, used = used, number(receipt["cumulativeGasUsed"])
        if number(receipt["gasUsed"]) != used - before:
            raise NotProven(f"receipt {index}: gasUsed is wrong")
        _check_parties(receipt, transaction)
        _check_price(receipt, transaction, block)
        for log in receipt["logs"]:
            _check_log(log, receipt, logs)
            logs += 1
    return [only_proven_receipt(each) for each in receipts]


def _check_price(receipt: RpcObject, transaction: RpcObject, block: RpcObject) -> None:
    claimed = receipt.get("effectiveGasPrice")
    if claimed is not None and number(claimed) != (0 if _is_deposit(transaction) else price_of(transaction, block)):
        raise NotProven("effectiveGasPrice of a receipt is wrong")


def encode_receipt(receipt: RpcObject) -> bytes:
    kind = _kind(receipt)
    logs = [[raw(log["address"]), [raw(each) for each in log["topics"]], raw(log["data"])] for log in receipt["logs"]]
    before = [_field(receipt, name) for name in (_outcome(receipt), "#cumulativeGasUsed", "logsBloom")]
    fields = [*before, logs, *(_field(receipt, name) for name in _deposit_of(receipt))]
    return (bytes([kind]) if kind else b"") + bytes(rlp.encode(fields))


def _outcome(receipt: RpcObject) -> str:
    """The field with the outcome of a transaction: before Byzantium the root of the state after it. Nothing shorter is taken
    for a root: a status under this name would have the same hash."""
    return "root" if len(raw(receipt.get("root") or None)) == ROOT_BYTES else "#status"


def _is_deposit(source: RpcObject) -> bool:
    return _kind(source) == DEPOSIT


def _deposit_of(receipt: RpcObject) -> Sequence[str]:
    """Fields of a deposit's receipt, since Canyon. Before that, its nonce is not hashed."""
    is_hashed = _is_deposit(receipt) and receipt.get("depositReceiptVersion") is not None
    return ("#depositNonce", "#depositReceiptVersion") if is_hashed else ()


def _check_place(
    entry: RpcObject, block: RpcObject, place: int, *, hash_name: str = "hash", of: RpcObject | None = None
) -> None:
    """Check that a transaction or a receipt names the block, the index and the hash that are true."""
    expected = {
        "blockHash": raw(block["hash"]),
        "blockNumber": number(block["number"]),
        "transactionIndex": place,
        **({hash_name: raw(of["hash"])} if of is not None else {}),
    }
    for name, value in expected.items():
        if (raw(entry[name]) if isinstance(value, bytes) else number(entry[name])) != value:
            raise NotProven(f"{name} of transaction {place} is wrong")


def _check_parties(receipt: RpcObject, transaction: RpcObject) -> None:
    for name in ("from", "to"):
        if _recipient(receipt.get(name)) != raw(transaction.get(name)):
            raise NotProven(f"{name} of a receipt is wrong")
    if _is_deposit(transaction):
        return
    created, derived = _recipient(receipt.get("contractAddress")), b""
    if transaction.get("to") is None:
        derived = keccak(rlp.encode([raw(transaction["from"]), _field(transaction, "#nonce")]))[12:]
    # Nodes disagree on whether a failed creation has an address.
    if created != derived and not (not created and _optional(receipt.get("status")) == 0):
        raise NotProven("contractAddress of a receipt is wrong")


def _check_log(log: RpcObject, receipt: RpcObject, index: int) -> None:
    for name in ("blockHash", "transactionHash"):
        if raw(log[name]) != raw(receipt[name]):
            raise NotProven(f"{name} of a log is wrong")
    if number(log["logIndex"]) != index or number(log["transactionIndex"]) != number(receipt["transactionIndex"]):
        raise NotProven("the index of a log is wrong")
    if number(log["blockNumber"]) != number(receipt["blockNumber"]) or log.get("removed") not in (None, False):
        raise NotProven("a log names another block")


def root_of(values: Sequence[bytes]) -> bytes:
    """The root of the trie of these values by their index."""
    if not values:
        return EMPTY_TRIE
    trie = HexaryTrie({}, prune=True)
    for index, value in enumerate(values):
        trie[rlp.encode(index)] = value
    return bytes(trie.root_hash)


# Blooms


def may_contain(bloom: bytes, part: bytes) -> bool:
    """Whether a block's bloom filter allows for a log with this address or topic. Three bits of the hash decide."""
    digest = keccak(part)
    for place in (0, 2, 4):
        bit = int.from_bytes(digest[place : place + 2], "big") & 2047
        if not bloom[255 - bit // 8] >> (bit % 8) & 1:
            return False
    return True
