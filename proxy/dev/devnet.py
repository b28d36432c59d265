"""The development chain with what belongs to it: the contracts on it, and the bundler beside it.

The chain forgets everything when it ends. Whenever it has been started its contracts are deployed, at the addresses that they
always have, and the bundler, which remembers another chain, is started again.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from proxy.dev.bundler import MISSING, bundler, is_installed
from proxy.dev.chain import development_chain
from proxy.dev.child import Child
from proxy.dev.contracts import DevContracts, everything
from proxy.dev.deploy import deploy
from proxy.dev.display import Display
from proxy.tasks import Tasks


class Devnet:
    """Addresses are known from the beginning; `start` makes them true."""

    def __init__(self, data: Path, display: Display, *, with_contracts: bool = True, with_bundler: bool = True) -> None:
        self._display = display
        self._chain, self.url = development_chain(data / "chain", data / "logs" / "chain.log")
        self._steps, self.contracts = everything() if with_contracts else ([], DevContracts())
        self._bundler: Child | None = None
        self.bundler_url: str | None = None
        # One without contracts has nothing to bundle for.
        self._lacks_bundler = with_bundler and with_contracts and not is_installed()
        if with_bundler and with_contracts and not self._lacks_bundler:
            entry_points = self.contracts.entry_points.values()
            self._bundler, self.bundler_url = bundler(self.url, entry_points, data / "logs" / "bundler.log")

    def __repr__(self) -> str:
        return f"<Devnet {self.url} {self._chain} {self._bundler}>"

    async def start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._chain.stop)
        if self._bundler is not None:
            stack.push_async_callback(self._bundler.stop)
        with self._display.part("chain"):
            await self._chain.start()
        if self._steps:
            with self._display.part("contracts"):
                await deploy(self.url, self._steps)

    def keep(self, tasks: Tasks) -> None:
        """The chain, from here on: started again when it dies."""
        tasks.start("chain", lambda: self._chain.keep(again=self._renew))

    async def start_bundler(self, tasks: Tasks) -> None:
        """Apart from the rest, which need not wait for it; and kept from then on."""
        if self._lacks_bundler:
            self._display.note("bundler", MISSING)
        if self._bundler is not None:
            with self._display.part("bundler"):
                await self._bundler.start()
            tasks.start("bundler", self._bundler.keep)

    async def _renew(self) -> None:
        await deploy(self.url, self._steps)
        if self._bundler is not None:
            await self._bundler.stop()
