"""The listeners of one topic, and the accounts among them, which pay in turn for the calls that the topic needs."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.core.usage import Tally
from proxy.services.feed.topics import Listener


class Listeners:
    def __init__(self) -> None:
        self._all: dict[Listener, None] = {}
        # In the order of their next turns to pay.
        self._by_account: dict[str, dict[Listener, None]] = {}

    def __repr__(self) -> str:
        return f"<Listeners {len(self._all)} of {len(self._by_account)} accounts>"

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Listener]:
        """All listeners. They may be removed during the iteration."""
        return iter(tuple(self._all))

    def add(self, listener: Listener) -> None:
        self._all[listener] = None
        self._by_account.setdefault(listener.account, {})[listener] = None

    def remove(self, listener: Listener) -> bool:
        """False if it was not there."""
        if listener not in self._all:
            return False
        del self._all[listener]
        own = self._by_account[listener.account]
        del own[listener]
        if not own:
            del self._by_account[listener.account]
        return True

    @property
    def accounts(self) -> list[str]:
        """The next one to pay comes first."""
        return [*self._by_account]

    def of_account(self, account: str) -> Listener | None:
        """One listener of the account."""
        return next(iter(self._by_account.get(account, ())), None)

    def pass_turn(self, account: str) -> None:
        """The account has its turn to pay again after all others."""
        self._by_account[account] = self._by_account.pop(account)

    def charge(self, units: int, tally: Tally) -> str | None:
        """Charge the first account in turn that has these units, and return it; None if no account has."""
        for account in self.accounts:
            listener = self.of_account(account)
            if listener is not None and listener.charge(units, tally):
                self.pass_turn(account)
                return account
        return None
