"""Processes of one kind that are alive, over all hosts: each announces itself every second, and is forgotten a few seconds
after its last announcement."""

from __future__ import annotations

import asyncio

from proxy.core.rendezvous import owner_of
from proxy.store.valkey.valkey_address import TAG
from proxy.store.valkey.valkey_link import ValkeyLink

MEMBERS = "penstock_members_1"
ALIVE_S = 3.5
RENEW_S = 1.0


class LiveMembers:
    def __init__(self, link: ValkeyLink, kind: str, name: str) -> None:
        self._link = link
        self._kind = kind
        self._name = name
        self.names: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<LiveMembers {len(self.names)} {self._kind}>"

    def owns(self, name: str) -> bool:
        """Whether this process is to serve the name. While Valkey is away, every process serves every name."""
        return not self._link.is_up or self._name not in self.names or owner_of(name, self.names) == self._name

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            await self.renew()
            await asyncio.sleep(RENEW_S)

    async def renew(self) -> None:
        words = (MEMBERS, "1", f"{TAG}:{self._kind}", self._name, str(int(ALIVE_S * 1000)))
        reply = await self._link.ask("FCALL", *words)
        if isinstance(reply, list):
            self.names = frozenset(each.decode() for each in reply)
