"""Which database has the index of each network.

The index of a network (holdings, recorded blocks, back-fills) is most of the data, and no statement joins those of two
networks. So it may be in another Postgres than accounts, usage and webhooks. Such a network is followed twice, once in each
database, each time with a cursor of that database: a block is one transaction in each, and none has to wait for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proxy.settings import Settings
from proxy.store.postgres.pool import Pool

# The database of [database], in metrics and messages.
MAIN = "main"
# After a network's name in metrics and lists: its index, which is in another database.
INDEX = " index"


class IndexDatabases:
    def __init__(self, main: Pool, others: Mapping[str, Pool], database_of: Mapping[str, str]) -> None:
        """`others`: databases by name. `database_of`: the name of the one with a network's index, if it is not the main one."""
        self._main = main
        self._others = others
        self._database_of = database_of

    @classmethod
    def of(cls, settings: Settings, main: Pool, **pool: Any) -> IndexDatabases:
        """`pool`: arguments of the pools that replace settings."""
        others = {
            each.name: Pool.of(replace(settings.database, url=each.url, direct_url=each.direct_url), **pool)
            for each in settings.databases
        }
        database_of = {network: each.name for each in settings.databases for network in each.networks}
        return cls(main, others, database_of)

    def __repr__(self) -> str:
        return f"<IndexDatabases {self._database_of!r}>"

    def pool_of(self, network: str) -> Pool:
        return self._others[self._database_of[network]] if self.is_split(network) else self._main

    def is_split(self, network: str) -> bool:
        """Whether the network's index is not in the main database."""
        return network in self._database_of

    @property
    def by_name(self) -> Mapping[str, Pool]:
        return {MAIN: self._main, **self._others}

    @property
    def split_pools(self) -> Mapping[str, Pool]:
        """The pools of the networks whose index is not in the main database."""
        return {network: self._others[name] for network, name in self._database_of.items()}

    async def open(self) -> None:
        """Open the other databases. The main one belongs to the process."""
        for pool in self._others.values():
            await pool.open()

    async def close(self) -> None:
        for pool in self._others.values():
            await pool.close()
