"""Checks of accounts and storage against the state root of a block, by the proofs of `eth_getProof` (EIP-1186)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import rlp
from trie import HexaryTrie

from proxy.chains.evm.block_proofs import EMPTY_TRIE, NotProven, keccak, number, raw

NO_CODE = keccak(b"")


def check_account(proof: Mapping[str, Any], address: bytes, state_root: bytes) -> None:
    """Check that nonce, balance, code hash and storage root are those of the account in this state."""
    if raw(proof["address"]) != address:
        raise NotProven("the proof is of another account")
    account = _proven(state_root, keccak(address), proof["accountProof"])
    claimed = (
        number(proof["nonce"]),
        number(proof["balance"]),
        raw(proof["storageHash"]),
        raw(proof["codeHash"]),
    )
    if account:
        nonce, balance, storage, code = rlp.decode(account)
        expected = (int.from_bytes(nonce, "big"), int.from_bytes(balance, "big"), storage, code)
    else:
        expected = (0, 0, EMPTY_TRIE, NO_CODE)
        # Nodes disagree on how to write the hashes of an account that does not exist.
        claimed = (
            *claimed[:2],
            claimed[2] if any(claimed[2]) else EMPTY_TRIE,
            claimed[3] if any(claimed[3]) else NO_CODE,
        )
    if claimed != expected:
        raise NotProven("the account differs from its proof")


def check_slot(proof: Mapping[str, Any], slot: int) -> int:
    """The value of a storage slot. `proof` belongs to an account that was checked."""
    proofs = [each for each in proof["storageProof"] if number(each["key"]) == slot]
    if len(proofs) != 1:
        raise NotProven("there is no proof for the slot")
    value = _proven(raw(proof["storageHash"]), keccak(slot.to_bytes(32, "big")), proofs[0]["proof"])
    expected = int.from_bytes(rlp.decode(value), "big") if value else 0
    if number(proofs[0]["value"]) != expected:
        raise NotProven("the slot differs from its proof")
    return expected


def _proven(root: bytes, key: bytes, nodes: Sequence[str]) -> bytes:
    """The value under the key in the trie of this root; empty if the proof shows that there is none."""
    if not nodes and root in (EMPTY_TRIE, bytes(32)):
        return b""
    try:
        return bytes(HexaryTrie.get_from_proof(root, key, [rlp.decode(raw(each)) for each in nodes]))
    except Exception:  # The library raises many kinds of errors for invalid nodes.
        raise NotProven("the proof does not lead from the state root to the value") from None
