"""The prices of providers for calls, in their own credits, and the count of them for each upstream.

A `CreditTable` is a provider's price list (`config/providers`), `CallPrices` is that list for one chain, with the prices that
the settings of an upstream change. A `CreditMeter` counts the attempts of one upstream. An attempt is counted when it begins,
at the price of its method, so that nothing is spent that was not counted. If it turns out that the provider bills less, because
the call was never sent or because of the error that came back, the difference is taken off again.

Money is counted in billionths of a US dollar: a credit costs a few hundred of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

from proxy.core.budgets import CreditBudget
from proxy.core.method_patterns import fitting_value

NANOS_PER_USD: Final = 1_000_000_000
CREDITS_PER_PRICE: Final = 1_000_000
# The method under which events of subscriptions are counted.
EVENT: Final = "event"
# The spender of credits: the method, the account and the key. The last two are empty for our own calls.
Spender = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class CreditTable:
    """A provider's prices. `methods` may end in `*`. `chains`: the price of a usual call on chains where it is not `default`,
    which changes all other prices there by the same factor. `archive_factor`: for calls that read old blocks, of methods
    without a price of their own. `errors`: the credits of a call that failed, by HTTP status (`429`, `4xx`),
    `unknown_method`, or `error` for any other JSON-RPC error; without an entry it costs as much as one that succeeded.
    `event`: one message of a subscription."""

    default: int = 0
    unit: str = "credit"
    date: str = ""
    source: str = ""
    usd_per_million: Decimal = Decimal(0)
    methods: Mapping[str, int] = field(default_factory=dict)
    chains: Mapping[str, int] = field(default_factory=dict)
    archive_factor: int = 1
    errors: Mapping[str, int] = field(default_factory=dict)
    event: int = 0


class CallPrices:
    """The prices of one provider on one chain. `own`: prices from an upstream's settings, which replace the provider's."""

    __slots__ = ("_known", "_known_archive", "_own", "_table", "chain")

    def __init__(self, table: CreditTable, chain: str, own: Mapping[str, int] | None = None) -> None:
        self._table = table
        self._own = own or {}
        self.chain = chain
        self._known: dict[str, int] = {}
        self._known_archive: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<CallPrices on {self.chain}, usually {self.credits('')} {self._table.unit}>"

    def credits(self, method: str, *, archive: bool = False) -> int:
        """The credits of a call that succeeds."""
        known = self._known_archive if archive else self._known
        price = known.get(method)
        if price is None:
            # Methods come from the family's table, so this is bounded.
            price = known[method] = self._look_up(method, archive=archive)
        return price

    def _look_up(self, method: str, *, archive: bool) -> int:
        own = fitting_value(self._own, method)
        if own is not None:
            return own
        if method == EVENT:
            return self._table.event
        listed = fitting_value(self._table.methods, method)
        price = self._table.default * (self._table.archive_factor if archive else 1) if listed is None else listed
        usual = self._table.chains.get(self.chain)
        return price if usual is None else price * usual // (self._table.default or 1)

    def failed(self, full: int, outcome: str) -> int:
        """The credits of a call that would have cost `full` and failed in this way: see `CreditTable.errors`."""
        errors = self._table.errors
        if outcome in errors:
            return min(full, errors[outcome])
        return min(full, errors.get(f"{outcome[:1]}xx", full)) if outcome.isdecimal() else full


@dataclass(slots=True)
class Spent:
    """An amount that was spent: calls that were sent, their credits, and their cost in billionths of a dollar."""

    calls: int = 0
    credits: int = 0
    nanos: int = 0

    def add(self, other: Spent) -> None:
        self.calls += other.calls
        self.credits += other.credits
        self.nanos += other.nanos


class CreditMeter:
    """Counts what the provider of one upstream bills for the calls of this process."""

    __slots__ = (
        "_nanos_per_million",
        "billing_day",
        "budget",
        "counts",
        "included",
        "label",
        "network",
        "prices",
        "total",
    )

    def __init__(
        self,
        label: str,
        network: str,
        prices: CallPrices,
        usd_per_million: Decimal,
        *,
        budget: CreditBudget | None = None,
        included: CreditBudget | None = None,
        billing_day: int = 1,
    ) -> None:
        """`included`: the credits of the plan, until whose end calls cost nothing more."""
        self.budget = budget
        self.included = included
        self.billing_day = billing_day
        self.label = label
        self.network = network
        self.prices = prices
        self._nanos_per_million = int(usd_per_million * NANOS_PER_USD)
        # The counts since `take`, and since the start.
        self.counts: dict[Spender, Spent] = {}
        self.total = Spent()

    def __repr__(self) -> str:
        return f"<CreditMeter {self.label}: {self.total.credits} credits>"

    def began(self, spender: Spender, *, archive: bool = False) -> int:
        """An attempt begins. Returns its cost."""
        return self._add(spender, 1, self.prices.credits(spender[0], archive=archive))

    def not_sent(self, spender: Spender, *, archive: bool = False) -> int:
        """The attempt was never sent, or on a connection that the upstream had closed. Returns the change of its cost."""
        return self._add(spender, -1, -self.prices.credits(spender[0], archive=archive))

    def failed(self, spender: Spender, outcome: str, *, archive: bool = False) -> int:
        """The attempt has failed. Returns the change of its cost."""
        full = self.prices.credits(spender[0], archive=archive)
        return self._add(spender, 0, self.prices.failed(full, outcome) - full)

    def affords(self, method: str, *, archive: bool = False) -> bool:
        """Whether the budget has credits for a call."""
        return self.budget is None or self.budget.affords(self.prices.credits(method, archive=archive))

    def may_wait(self, method: str, *, archive: bool = False) -> bool:
        """Whether the budget may have credits for a call after its next lease."""
        return self.budget is not None and self.budget.may_wait(self.prices.credits(method, archive=archive))

    def cost_of(self, method: str, *, archive: bool = False) -> int:
        """The cost of a call, in billionths of a dollar."""
        return self._nanos(self.prices.credits(method, archive=archive))

    def take(self) -> dict[Spender, Spent]:
        """Return the counts since the last time."""
        counts, self.counts = self.counts, {}
        return counts

    def _nanos(self, credits_: int) -> int:
        if self.included is not None and not self.included.is_over:
            return 0
        return credits_ * self._nanos_per_million // CREDITS_PER_PRICE

    def _add(self, spender: Spender, calls: int, credits_: int) -> int:
        spent = self.counts.get(spender)
        if spent is None:
            spent = self.counts[spender] = Spent()
        # A refund is exactly what was charged: rounding a negative amount would give another one. Only a call that was under
        # way when the included credits ended may be refunded more than it was charged.
        nanos = self._nanos(credits_) if credits_ >= 0 else -self._nanos(-credits_)
        change = Spent(calls, credits_, nanos)
        spent.add(change)
        self.total.add(change)
        if self.budget is not None:
            self.budget.spend(credits_)
        if self.included is not None and not self.included.is_over:
            self.included.spend(credits_)
        return nanos


def outcome_of_error(kind: str) -> str:
    """How a JSON-RPC error of this kind (`upstream_errors.ErrorKind`) is called in `CreditTable.errors`."""
    return _OUTCOMES.get(kind, "error")


_OUTCOMES: Final = {"rate_limited": "429", "unauthorized": "403", "unsupported": "unknown_method"}


def in_usd(nanos: int) -> str:
    """The amount in dollars, as a plain decimal number."""
    return f"{(Decimal(nanos) / NANOS_PER_USD).quantize(Decimal('0.000000001')):f}"
