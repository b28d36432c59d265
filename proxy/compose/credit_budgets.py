"""The prices and budgets of an upstream, from its settings."""

from __future__ import annotations

from decimal import Decimal

from proxy.chains.registry import Network
from proxy.core.budgets import CreditBudget
from proxy.core.credits import CallPrices
from proxy.settings import Tables
from proxy.settings.sections import UpstreamSettings

# The beginning of the names of credits that plans include.
INCLUDED = "included "


def prices_of(given: UpstreamSettings, network: Network, tables: Tables) -> tuple[CallPrices, Decimal]:
    """The credits of its calls, and the price of a million of them in US dollars."""
    table = tables.credit_table(given.cost)
    price = Decimal(given.credit_price) if given.credit_price else table.usd_per_million
    return CallPrices(table, network.chain.name, given.credits), price


def budget_of(given: UpstreamSettings, upstream_id: str) -> CreditBudget | None:
    """The credits that it may use. Upstreams with the same `shared` have one budget."""
    terms = given.budget
    if terms is None:
        return None
    return CreditBudget(
        terms.shared or upstream_id,
        terms.credits,
        per=terms.per,
        hard=terms.hard,
        billing_day=given.billing_day,
        paced=terms.paced,
        account_share=terms.account_share,
    )


def included_of(given: UpstreamSettings, upstream_id: str) -> CreditBudget | None:
    """The credits of a month that its plan includes. Upstreams that share a budget share them too."""
    if not given.included_credits:
        return None
    shared = "" if given.budget is None else given.budget.shared
    return CreditBudget(
        f"{INCLUDED}{shared or upstream_id}",
        given.included_credits,
        per="month",
        hard=False,
        billing_day=given.billing_day,
    )
