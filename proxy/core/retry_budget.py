"""How many retries and hedges a network's calls may cause."""

from __future__ import annotations

# The retries that each client still has when the shared budget is spent: a burst of this many, and this many per second.
OWN_RETRIES = 20
OWN_RETRIES_PER_S = 10.0
# Bounds memory. Beyond this, the client that has been tracked longest gets all of its own retries back.
MAX_CLIENTS = 10_000


class RetryBudget:
    """Bounds the extra load of retries and hedges. Each call adds `share` of a retry to the budget, up to `most`, which should
    cover all calls in flight on an upstream when it goes down. The budget starts with a fifth of `most`.

    All clients share the budget, and one whose calls all fail can use it up. Each client then still has a few retries of its
    own, which are refilled over time.
    """

    __slots__ = ("_most", "_own", "_saved", "_share")

    def __init__(self, share: float = 0.2, most: float = 500.0) -> None:
        self._share = share
        self._most = most
        self._saved = most / 5
        # By client: when its own retries will be fully refilled.
        self._own: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<RetryBudget {self._saved:.1f} of {self._most:.0f}>"

    def earn(self) -> None:
        saved = self._saved + self._share
        self._saved = saved if saved < self._most else self._most

    def spend(self, now: float = 0.0, client: str | None = None) -> bool:
        """Take one retry or hedge. Returns False if there is none left. Without a client, only the shared budget is used."""
        if self._saved >= 1.0:
            self._saved -= 1.0
            return True
        return client is not None and self._spend_own(client, now)

    def _spend_own(self, client: str, now: float) -> bool:
        full_at = max(self._own.get(client, 0.0), now) + 1.0 / OWN_RETRIES_PER_S
        if full_at - now > OWN_RETRIES / OWN_RETRIES_PER_S + 1e-9:
            return False
        if len(self._own) >= MAX_CLIENTS and client not in self._own:
            del self._own[next(iter(self._own))]
        self._own[client] = full_at
        return True
