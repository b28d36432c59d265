"""How many sockets and subscriptions an account may have open, by its plan. Keys are free, so the limits hold for all keys of
the account together, over all workers of the host."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.core.access import Key
from proxy.errors import RateLimited
from proxy.settings import Plan
from proxy.store.account_counts import AccountCounts


class SocketCaps:
    def __init__(self, plans: Mapping[str, Plan], counts: AccountCounts) -> None:
        self._plans = plans
        self._counts = counts

    def __repr__(self) -> str:
        return f"<SocketCaps {self._counts!r}>"

    def plan_of(self, key: Key) -> Plan:
        """The plan of the key's account. A plan that is no longer configured counts as the smallest."""
        return self._plans.get(key.account.plan) or self._plans["free"]

    def add_socket(self, key: Key) -> None:
        """Count one more socket, or raise RateLimited."""
        most = self.plan_of(key).sockets
        if not self._counts.take("sockets", key.rate.slot, most):
            message = f"this account has reached its limit of {most} open sockets"
            raise RateLimited(f"{message}: close one", retry_after_s=1)

    def remove_socket(self, key: Key) -> None:
        self._counts.give_back("sockets", key.rate.slot)

    def add_subscription(self, key: Key, on_socket: int) -> None:
        """Count one more subscription, or raise RateLimited. `on_socket`: those that its socket has already."""
        plan = self.plan_of(key)
        if on_socket >= plan.subscriptions:
            message = f"this socket has reached its limit of {plan.subscriptions} subscriptions: unsubscribe from one"
            raise RateLimited(f"{message}, or open another socket", retry_after_s=1)
        if not self._counts.take("subscriptions", key.rate.slot, plan.subscriptions_per_account):
            message = f"this account has reached its limit of {plan.subscriptions_per_account} subscriptions"
            raise RateLimited(f"{message}: unsubscribe from one", retry_after_s=1)

    def remove_subscription(self, key: Key) -> None:
        self._counts.give_back("subscriptions", key.rate.slot)
