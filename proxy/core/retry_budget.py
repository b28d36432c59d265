"""How many retries and hedges a network's calls may cause."""

from __future__ import annotations

# Retries that each client has for itself when the shared savings are spent: this many at once, and this many a second.
OWN_RETRIES = 20
OWN_RETRIES_PER_S = 10.0
# Bounds memory. Beyond this the client that spent its own retries first has all of them again.
MAX_CLIENTS = 10_000


class RetryBudget:
    """Extra load that retries and hedges may cause: a share of the calls, saved up. The savings must cover all calls that
    are under way on an upstream when it goes down; a few are granted from the start.

    All clients share the savings, and one whose calls all fail can use them up. Then each client still has a few retries of its
    own, which come back with time.
    """

    __slots__ = ("_most", "_own", "_saved", "_share")

    def __init__(self, share: float = 0.2, most: float = 500.0) -> None:
        self._share = share
        self._most = most
        self._saved = most / 5
        # By client: the moment from which on all its own retries are there again.
        self._own: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<RetryBudget {self._saved:.1f} of {self._most:.0f}>"

    def earn(self) -> None:
        saved = self._saved + self._share
        self._saved = saved if saved < self._most else self._most

    def spend(self, now: float = 0.0, client: str | None = None) -> bool:
        """Without a client only the savings are spent."""
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
