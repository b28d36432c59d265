"""How a reply is verified before it is passed on, and when upstreams agree on one.

*Quorum*: the call is sent to upstreams of several operators, and enough of them must give the same reply. *Proof*: the chain's
own hashes show that the reply of one upstream is true; a quorum is needed only for the hash of the block. Each operator has one
vote, however many upstreams it runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from hashlib import blake2b
from typing import Any, Literal

import msgspec

MOST_ASKED = 9
# Operators that must agree on the hash of the block that a proof starts from, unless the network has one upstream only.
PROOF_QUORUM = 2
# A proof takes about this many calls: the value with its proof, the header, and the header's hash elsewhere.
PROOF_PRICE = 4
# Members that some nodes leave out. They are ignored in comparisons. The reply has those in which all upstreams agree.
OPTIONAL = frozenset(
    ("author", "blockTimestamp", "removed", "root", "sealFields", "size", "totalDifficulty", "uncles", "v", "yParity")
)
# The messages for errors if upstreams agree on the code, but not on the message. Clients look for "reverted".
_REVERT_CODE, _REVERTED = 3, "execution reverted"
_OTHER_ERROR = "upstreams agree on the code of this error, but not on its message"
_QUORUM = re.compile(r"quorum ([1-9])/([1-9])", re.ASCII)


@dataclass(frozen=True, slots=True)
class Verification:
    kind: Literal["quorum", "proof"]
    # This many operators must agree, of this many that are asked. For a proof: on the hash of its block.
    needed: int
    asked: int

    def __str__(self) -> str:
        return "proof" if self.kind == "proof" else f"quorum {self.needed}/{self.asked}"

    @property
    def price_factor(self) -> int:
        return PROOF_PRICE if self.kind == "proof" else self.asked


PROOF = Verification("proof", PROOF_QUORUM, PROOF_QUORUM)
FORM = "proof, or quorum K/N with 1 < K <= N < 10"


def parse(text: str) -> Verification:
    """Read `quorum 2/3` or `proof`; raises ValueError."""
    if text == "proof":
        return PROOF
    found = _QUORUM.fullmatch(text)
    if found is None:
        raise ValueError
    needed, asked = int(found[1]), int(found[2])
    if not 1 < needed <= asked:
        raise ValueError
    return Verification("quorum", needed, asked)


# All of them as text, which is the value of X-Verified.
VERIFICATIONS = frozenset(
    [str(PROOF)] + [f"quorum {needed}/{asked}" for asked in range(2, MOST_ASKED + 1) for needed in range(2, asked + 1)]
)


# Comparing replies


def digest_of(result: bytes) -> str:
    """A digest that is the same for replies that differ only in what may differ: the order of members, the case of hex digits,
    and optional members."""
    return _digest(canonical(msgspec.json.decode(result)))


def digest_of_error(error: bytes) -> str:
    """A digest of an error. Nodes agree on the code and the data of a revert, but not on the message."""
    found = msgspec.json.decode(error)
    if not isinstance(found, dict):
        raise ValueError("an error must be an object")
    return _digest(["error", found.get("code"), canonical(found.get("data"))])


def agreed_result(results: Sequence[bytes]) -> bytes:
    """The result of upstreams that agree: no single one of them has chosen any part of it."""
    if all(each == results[0] for each in results):
        return results[0]
    return msgspec.json.encode(reduce(_common, map(msgspec.json.decode, results)))


def agreed_error(errors: Sequence[bytes]) -> bytes:
    """The same for errors. A message that not all of them give is replaced."""
    if all(each == errors[0] for each in errors):
        return errors[0]
    found = [msgspec.json.decode(each) for each in errors]
    code, message = found[0].get("code"), found[0].get("message")
    if any(each.get("message") != message for each in found):
        message = _REVERTED if code == _REVERT_CODE else _OTHER_ERROR
    data = reduce(_common, [each.get("data") for each in found])
    return msgspec.json.encode({"code": code, "message": message, **({} if data is None else {"data": data})})


def _common(one: Any, other: Any) -> Any:
    """One of two values with the same digest, without the optional members in which they differ."""
    if isinstance(one, dict):
        return {
            name: _common(member, other.get(name))
            for name, member in one.items()
            if name not in OPTIONAL or canonical(member) == canonical(other.get(name))
        }
    if isinstance(one, list):
        return [_common(*pair) for pair in zip(one, other, strict=True)]
    return one


def _digest(value: Any) -> str:
    return blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).hexdigest()


def canonical(value: Any, ignored: frozenset[str] = OPTIONAL) -> Any:
    """The value without what may differ between nodes. `ignored`: members that are left out."""
    if isinstance(value, dict):
        return {
            name: canonical(member, ignored)
            for name, member in value.items()
            if member is not None and name not in ignored
        }
    if isinstance(value, list):
        return [canonical(member, ignored) for member in value]
    return value.lower() if isinstance(value, str) and value.startswith("0x") else value


@dataclass(slots=True)
class Ballot:
    """The operators that gave each reply to one call, by the digest of the reply."""

    needed: int
    votes: dict[str, set[str]] = field(default_factory=dict)

    def add(self, digest: str, operator: str) -> bool:
        """Count a reply. Returns whether enough operators agree on it."""
        agreed = self.votes.setdefault(digest, set())
        agreed.add(operator)
        return len(agreed) >= self.needed
