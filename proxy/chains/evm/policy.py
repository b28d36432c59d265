"""Gas policies: their rules, and whether an operation meets them.

Rules arrive validated by the API spec's schema; this module parses them and rejects what no schema can check. A rule
that is absent does not restrict. Dollar amounts are whole pico-dollars: rounding stays invisible, and there are no
floats.

There are two kinds of rules. Those about the operation itself (its sender, its calls, its price, the time) are decided
here. Those about remaining amounts (dollars, operations, requests) are decided by the ledger, in the statement that
reserves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, Protocol

from proxy.chains.evm.fees import gwei, wei_of
from proxy.core.units import formatted

ResetPeriod = Literal["never", "daily", "weekly", "monthly"]
LimitScope = Literal["policy", "user"]
# Decimals of a dollar amount.
DECIMALS = 12
# A larger number is not a plausible amount, and would not fit the ledger.
MOST_DIGITS = 24
MOST_EXPIRY_S = 300
# Times the fast price: a higher offer only serves a bundler that wants to earn the difference.
MOST_TIMES_FAST = 2
# The rules that are lists of addresses or methods.
LISTS = ("allowed_contracts", "allowed_methods", "sender_allowlist", "sender_denylist")


class BadRule(ValueError):
    """An invalid rule; the message names it."""


class OperationCall(Protocol):
    """One call that the operation's account makes. Less than four bytes of data have no selector."""

    @property
    def target(self) -> bytes: ...
    @property
    def selector(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class FamilyFormats:
    """How a family writes addresses and methods, and how times are read; each raises ValueError."""

    address: Callable[[str], bytes]
    selector: Callable[[str], bytes]
    moment: Callable[[str], float]


@dataclass(frozen=True, slots=True)
class RateLimit:
    requests: int
    per_seconds: int
    scope: LimitScope


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """None: not restricted. Dollars in pico-dollars, times in seconds since 1970."""

    max_gas: int | None
    max_total: int | None
    max_per_user: int | None
    max_per_user_per_day: int | None
    reset: ResetPeriod
    rate_limit: RateLimit | None
    allowed_contracts: frozenset[bytes] | None
    allowed_methods: frozenset[bytes] | None
    sender_allowlist: frozenset[bytes] | None
    sender_denylist: frozenset[bytes] | None
    starts_at: float | None
    ends_at: float | None
    expiry_seconds: int
    max_gas_price_wei: int | None
    min_gas_efficiency: Fraction | None

    @property
    def reads_calls(self) -> bool:
        return self.allowed_contracts is not None or self.allowed_methods is not None


def without_lists(given: Mapping[str, Any]) -> dict[str, Any]:
    """The rules without the lists, which may be long: without them, `parse` takes microseconds."""
    return {name: value for name, value in given.items() if name not in LISTS}


def with_lists(rules: Rules, lists: Mapping[str, set[bytes]]) -> Rules:
    """Rules that were parsed without their lists, with these."""
    entries: dict[str, Any] = {name: frozenset(listed) for name, listed in lists.items()}
    return replace(rules, **entries)


def parse(given: Mapping[str, Any], forms: FamilyFormats) -> Rules:
    """The rules, or BadRule. Long lists are slow to read: they can be read in parts with `entries`."""
    rules = Rules(
        max_gas=_dollars(given, "max_gas_usd"),
        max_total=_dollars(given, "max_total_usd"),
        max_per_user=_dollars(given, "max_per_user_usd"),
        max_per_user_per_day=given.get("max_per_user_per_day"),
        reset=given.get("reset", "never"),
        rate_limit=_rate(given.get("rate_limit")),
        **{name: _each(given, name, forms) for name in LISTS},
        starts_at=_moment(given, "starts_at", forms),
        ends_at=_moment(given, "ends_at", forms),
        expiry_seconds=min(given.get("expiry_seconds", MOST_EXPIRY_S), MOST_EXPIRY_S),
        max_gas_price_wei=_gwei(given, "max_gas_price_gwei"),
        min_gas_efficiency=_share(given, "min_gas_efficiency"),
    )
    if rules.starts_at is not None and rules.ends_at is not None and rules.starts_at >= rules.ends_at:
        raise BadRule("rules.ends_at: must be after starts_at")
    return rules


def pico(text: str) -> int:
    """A decimal text in dollars as pico-dollars, rounded down."""
    whole, _, part = text.partition(".")
    return int(whole + part[:DECIMALS].ljust(DECIMALS, "0"))


def usd(amount: int) -> str:
    """Pico-dollars as decimal text in dollars, exact."""
    return formatted(amount, DECIMALS)


def cost(wei: int, *, price: int, decimals: int) -> int:
    """The value of an amount of wei in pico-dollars; `price` is that of one whole coin. Rounded up, so that the parts of an
    amount never cost less than the whole."""
    coin: int = 10**decimals
    return -(-wei * price // coin)


# Whether an operation meets them


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOperation:
    """The parts of an operation that rules check. `calls`: None if they cannot be decoded. `worst`: the most that it can
    cost, in pico-dollars; None while its gas is not known yet."""

    sender: bytes
    calls: Sequence[OperationCall] | None
    max_fee_wei: int
    worst: int | None
    now: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """The rule that refused, the reason, and the remaining amount if the rule limits one."""

    rule: str
    message: str
    left: str | int | None = None


def decide(rules: Rules, asked: PolicyOperation) -> Refusal | None:
    return _of_time(rules, asked) or _of_sender(rules, asked) or _of_calls(rules, asked) or _of_price(rules, asked)


def _of_time(rules: Rules, asked: PolicyOperation) -> Refusal | None:
    if rules.starts_at is not None and asked.now < rules.starts_at:
        return Refusal("starts_at", "the policy does not sponsor yet")
    if rules.ends_at is not None and asked.now >= rules.ends_at:
        return Refusal("ends_at", "the policy does not sponsor any more")
    return None


def _of_sender(rules: Rules, asked: PolicyOperation) -> Refusal | None:
    if rules.sender_denylist is not None and asked.sender in rules.sender_denylist:
        return Refusal("sender_denylist", "the sender is on the policy's list of those it never sponsors")
    if rules.sender_allowlist is not None and asked.sender not in rules.sender_allowlist:
        return Refusal("sender_allowlist", "the sender is not on the policy's list")
    return None


def _of_calls(rules: Rules, asked: PolicyOperation) -> Refusal | None:
    if not rules.reads_calls:
        return None
    rule = "allowed_contracts" if rules.allowed_contracts is not None else "allowed_methods"
    if asked.calls is None:
        return Refusal(rule, "the calls inside callData cannot be read: it must be an execute or executeBatch")
    for index, call in enumerate(asked.calls):
        if rules.allowed_contracts is not None and call.target not in rules.allowed_contracts:
            return Refusal(
                "allowed_contracts", f"call {index + 1} goes to 0x{call.target.hex()}, which the policy does not allow"
            )
        if rules.allowed_methods is not None and call.selector not in rules.allowed_methods:
            named = f"the method 0x{call.selector.hex()}" if call.selector else "no method"
            return Refusal("allowed_methods", f"call {index + 1} calls {named}, which the policy does not allow")
    return None


def _of_price(rules: Rules, asked: PolicyOperation) -> Refusal | None:
    most = rules.max_gas_price_wei
    if most is not None and asked.max_fee_wei > most:
        return Refusal("max_gas_price_gwei", f"maxFeePerGas is above the policy's {gwei(most)} gwei", gwei(most))
    if rules.max_gas is not None and asked.worst is not None and asked.worst > rules.max_gas:
        return Refusal(
            "max_gas_usd",
            f"the operation can cost {usd(asked.worst)} USD, more than the policy's {usd(rules.max_gas)}",
            usd(rules.max_gas),
        )
    return None


def overpriced(max_fee_wei: int, *, fast_wei: int) -> Refusal | None:
    """Applies under all rules. `fast_wei`: the maximum fee of the current "fast" estimate."""
    most = MOST_TIMES_FAST * fast_wei
    if max_fee_wei <= most:
        return None
    said = f"maxFeePerGas is above {gwei(most)} gwei, {MOST_TIMES_FAST} times the fast price of the moment"
    return Refusal("max_gas_price_gwei", said, gwei(most))


def too_wasteful(rules: Rules, *, expected_gas: int | None, call_gas: int) -> Refusal | None:
    """`expected_gas`: the gas that the account's call is expected to use; None if it is expected to fail."""
    least = rules.min_gas_efficiency
    if least is None:
        return None
    rule = "min_gas_efficiency"
    if expected_gas is None:
        return Refusal(rule, "the operation's call is expected to fail")
    if call_gas and Fraction(expected_gas, call_gas) < least:
        return Refusal(rule, f"of callGasLimit {call_gas} the call is expected to use {expected_gas}: lower the limit")
    return None


# Reading


def _dollars(given: Mapping[str, Any], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if len(text.partition(".")[0].lstrip("0")) > MOST_DIGITS:
        raise BadRule(f"rules.{name}: is more than there is")
    return pico(text)


def _gwei(given: Mapping[str, Any], name: str) -> int | None:
    text = given.get(name)
    return None if text is None else wei_of(text)


def _share(given: Mapping[str, Any], name: str) -> Fraction | None:
    text = given.get(name)
    if text is not None and len(text) > 2 * DECIMALS:
        raise BadRule(f"rules.{name}: has too many digits")
    return None if text is None else Fraction(text)


def _moment(given: Mapping[str, Any], name: str, forms: FamilyFormats) -> float | None:
    try:
        return None if name not in given else forms.moment(given[name])
    except ValueError:
        raise BadRule(f"rules.{name}: is not a time such as 2026-01-15T09:30:00Z") from None


def _rate(given: Mapping[str, Any] | None) -> RateLimit | None:
    return None if given is None else RateLimit(given["requests"], given["per_seconds"], given.get("scope", "policy"))


def _each(given: Mapping[str, Any], name: str, forms: FamilyFormats) -> frozenset[bytes] | None:
    texts = given.get(name)
    return None if texts is None else frozenset(entries(name, texts, forms))


def entries(name: str, texts: Sequence[str], forms: FamilyFormats, first: int = 0) -> list[bytes]:
    """A part of one of the LISTS; `first` is the place of its first entry in the whole list, for the message."""
    read = forms.selector if name == "allowed_methods" else forms.address
    parsed = []
    for index, text in enumerate(texts, first):
        try:
            parsed.append(read(text))
        except ValueError as exc:
            raise BadRule(f"rules.{name}.{index}: {exc}") from None
    return parsed
