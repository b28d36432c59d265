"""How a reply is verified before it is passed on, and when upstreams agree on one.

*Quorum*: the call is sent to upstreams of several operators, and enough of them must give the same reply. *Proof*: the chain's
own hashes show that the reply of one upstream is true; a quorum is needed only for the hash of the block. Each operator has one
vote, however many upstreams it runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from hashlib import blake2b
from typing import Any, Literal

import msgspec

MOST_ASKED = 9
# Operators that must agree on the hash of the block that a proof starts from, unless the network has one upstream only.
PROOF_QUORUM = 2
# A proof takes about this many calls: the value with its proof, the header, and the header's hash elsewhere.
PROOF_PRICE = 4
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
    match = _QUORUM.fullmatch(text)
    if match is None:
        raise ValueError
    needed, asked = int(match[1]), int(match[2])
    if not 1 < needed <= asked:
        raise ValueError
    return Verification("quorum", needed, asked)


# All of them as text, which is the value of X-Verified.
VERIFICATIONS = frozenset(
    [str(PROOF)] + [f"quorum {needed}/{asked}" for asked in range(2, MOST_ASKED + 1) for needed in range(2, asked + 1)]
)


# Comparing replies


# Comparisons leave out the members that a chain family or a method calls *volatile*: some nodes do not have them, or they
# change with every block. A name stands for members of this name wherever they are, and a path such as `body.finalized` for
# one place. A reply has those in which all upstreams agree.


def digest_of(result: bytes, volatile: frozenset[str] = frozenset()) -> str:
    """A digest that is the same for replies that differ only in what may differ: the order of members, the case of hex digits,
    and volatile members."""
    return _digest(canonical(msgspec.json.decode(result), volatile))


def digest_of_error(error: bytes, volatile: frozenset[str] = frozenset()) -> str:
    """A digest of an error. Nodes agree on the code and the data of a revert, but not on the message."""
    decoded = msgspec.json.decode(error)
    if not isinstance(decoded, dict):
        raise ValueError("an error must be an object")
    return _digest(["error", decoded.get("code"), canonical(decoded.get("data"), volatile)])


def agreed_result(results: Sequence[bytes], volatile: frozenset[str] = frozenset()) -> bytes:
    """The result of upstreams that agree: no single one of them has chosen any part of it."""
    if all(each == results[0] for each in results):
        return results[0]
    values = [_with_numbers_as_text(each) for each in results]
    for path in [each for each in volatile if "." in each]:
        if any(_at(each, path) != _at(values[0], path) for each in values):
            values = [_without(each, path) for each in values]
    return msgspec.json.encode(reduce(partial(_common, volatile=volatile), values))


def agreed_error(errors: Sequence[bytes], volatile: frozenset[str] = frozenset()) -> bytes:
    """The same for errors. A message that not all of them give is replaced."""
    if all(each == errors[0] for each in errors):
        return errors[0]
    decoded = [msgspec.json.decode(each) for each in errors]
    code, message = decoded[0].get("code"), decoded[0].get("message")
    if any(each.get("message") != message for each in decoded):
        message = _REVERTED if code == _REVERT_CODE else _OTHER_ERROR
    data = reduce(partial(_common, volatile=volatile), [each.get("data") for each in decoded])
    return msgspec.json.encode({"code": code, "message": message, **({} if data is None else {"data": data})})


def _common(one: Any, other: Any, volatile: frozenset[str]) -> Any:
    """One of two values with the same digest, without the volatile members in which they differ."""
    if isinstance(one, dict):
        return {
            name: _common(member, other.get(name), volatile)
            for name, member in one.items()
            if name not in volatile or _canonical(member, volatile) == _canonical(other.get(name), volatile)
        }
    if isinstance(one, list):
        return [_common(*pair, volatile) for pair in zip(one, other, strict=True)]
    return one


# Amounts in decimals must not be written in another way than the upstream's.
_with_numbers_as_text = msgspec.json.Decoder(float_hook=lambda digits: msgspec.Raw(digits.encode())).decode


def _digest(value: Any) -> str:
    return blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).hexdigest()


def canonical(value: Any, volatile: frozenset[str] = frozenset()) -> Any:
    """The value without what may differ between nodes that are right."""
    for path in [each for each in volatile if "." in each]:
        value = _without(value, path)
    return _canonical(value, volatile)


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _without(value: Any, path: str) -> Any:
    """The value without the member at a path."""
    name, _, rest = path.partition(".")
    if not isinstance(value, dict) or name not in value:
        return value
    below = {name: _without(value[name], rest)} if rest else {}
    return {each: member for each, member in value.items() if each != name} | below


def _canonical(value: Any, volatile: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {
            name: _canonical(member, volatile)
            for name, member in value.items()
            if member is not None and name not in volatile
        }
    if isinstance(value, list):
        return [_canonical(member, volatile) for member in value]
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
