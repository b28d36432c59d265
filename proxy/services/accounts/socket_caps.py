"""How many sockets and subscriptions an account may have open, by its plan. Keys are free, so the limits hold for all keys of
the account together, over all workers of the host, and over all hosts if they share a Valkey."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.core.access import Key
from proxy.errors import RateLimited
from proxy.settings import Plan
from proxy.store.shared_memory.account_counts import AccountCounts, CountKind
from proxy.store.valkey.fleet_counts import FleetCounts


class SocketCaps:
    def __init__(
        self, plans: Mapping[str, Plan], counts: AccountCounts, fleet_counts: FleetCounts | None = None
    ) -> None:
        self._plans = plans
        self._counts = counts
        self._fleet = fleet_counts

    def __repr__(self) -> str:
        return f"<SocketCaps {self._counts!r}>"

    def plan_of(self, key: Key) -> Plan:
        """The plan of the key's account. A plan that is no longer configured counts as the smallest."""
        return self._plans.get(key.account.plan) or self._plans["free"]

    async def add_socket(self, key: Key) -> None:
        """Count one more socket, or raise RateLimited."""
        most = self.plan_of(key).sockets
        if not (place := self._counts.take("sockets", key.rate.bucket_index, most)):
            raise _too_many_sockets(most)
        if self._fleet is None:
            return
        try:
            is_within = await self._fleet.is_within("sockets", key.rate.bucket_index, most, place=place)
        except BaseException:
            self.remove_socket(key)
            raise
        if not is_within:
            self.remove_socket(key)
            raise _too_many_sockets(most)

    def remove_socket(self, key: Key) -> None:
        self._remove("sockets", key)

    def _remove(self, kind: CountKind, key: Key) -> None:
        self._counts.give_back(kind, key.rate.bucket_index)
        if self._fleet is not None:
            self._fleet.changed(kind, key.rate.bucket_index)

    def add_subscription(self, key: Key, on_socket: int) -> int:
        """Count one more subscription and return its place on this host, or raise RateLimited. `on_socket`: those that its
        socket has already."""
        plan = self.plan_of(key)
        if on_socket >= plan.subscriptions:
            message = f"this socket has reached its limit of {plan.subscriptions} subscriptions: unsubscribe from one"
            raise RateLimited(f"{message}, or open another socket", retry_after_s=1)
        most, bucket_index = plan.subscriptions_per_account, key.rate.bucket_index
        room = most if self._fleet is None else self._fleet.room("subscriptions", bucket_index, most)
        if not (place := self._counts.take("subscriptions", bucket_index, room)):
            raise _too_many_subscriptions(most)
        return place

    async def check_subscription(self, key: Key, place: int) -> None:
        """Compare a counted subscription with those of other hosts. Raises RateLimited; the caller then removes it."""
        most = self.plan_of(key).subscriptions_per_account
        is_within = self._fleet is None or await self._fleet.is_within(
            "subscriptions", key.rate.bucket_index, most, place=place
        )
        if not is_within:
            raise _too_many_subscriptions(most)

    def remove_subscription(self, key: Key) -> None:
        self._remove("subscriptions", key)


def _too_many_subscriptions(most: int) -> RateLimited:
    message = f"this account has reached its limit of {most} subscriptions: unsubscribe from one"
    return RateLimited(message, retry_after_s=1)


def _too_many_sockets(most: int) -> RateLimited:
    return RateLimited(f"this account has reached its limit of {most} open sockets: close one", retry_after_s=1)
