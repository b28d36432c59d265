"""Deletes an account: its personal data, keys, sessions, webhooks and gas policies. Its ledger of sponsored gas stays.

First the account and everything that acts for it ends, in one transaction; then its webhooks are deleted one by one, because
each has to reach the processes that follow its network. A removal that is interrupted continues when it is repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from proxy.core.paging import Page
from proxy.errors import InvalidRequest
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.webhooks import WebhookStore

PAGE = Page(1, 100)


class AccountRemoval:
    def __init__(self, keys: KeyStore, webhooks: WebhookStore) -> None:
        self._keys = keys
        self._webhooks = webhooks

    def __repr__(self) -> str:
        return f"<AccountRemoval {self._keys!r}>"

    async def remove(self, account: str) -> None:
        await self._keys.erase_account(account)
        while webhooks := (await self._webhooks.list_of(account, live=True, status=None, page=PAGE))[0]:
            for webhook in webhooks:
                await self._webhooks.move(webhook, "delete")

    async def remove_confirmed(self, account: str, email: str, prove: Callable[[], Awaitable[None]]) -> None:
        """Remove the account if its holder has typed its email address, and `prove` raises no error."""
        row = await self._keys.read_account(account)
        if row["email"].lower() != email.strip().lower():
            raise InvalidRequest("email: must be the account's email address", param="email")
        await prove()
        await self.remove(account)
