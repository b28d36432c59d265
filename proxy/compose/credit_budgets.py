"""The budgets of an upstream, from its settings."""

from __future__ import annotations

from proxy.core.budgets import CreditBudget
from proxy.settings.sections import UpstreamSettings


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
    )


def included_of(given: UpstreamSettings, upstream_id: str) -> CreditBudget | None:
    """The credits of a month that its plan includes. Upstreams that share a budget share them too."""
    if not given.included_credits:
        return None
    shared = "" if given.budget is None else given.budget.shared
    return CreditBudget(
        f"included {shared or upstream_id}",
        given.included_credits,
        per="month",
        hard=False,
        billing_day=given.billing_day,
    )
