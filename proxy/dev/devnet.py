"""The development chain with its contracts and its bundler.

The chain's state is lost when it ends. After every start the contracts are deployed again, at the same addresses, and the
bundler is restarted, because its state belongs to the old chain.
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
    """All URLs and contract addresses are known before `start`."""

    def __init__(
        self, data: Path, home: Path, display: Display, *, with_contracts: bool = True, with_bundler: bool = True
    ) -> None:
        self._display = display
        self._chain, self.url = development_chain(data / "chain", data / "logs" / "chain.log", home)
        self._steps, self.contracts = everything(home) if with_contracts else ([], DevContracts())
        self._bundler: Child | None = None
        self.bundler_url: str | None = None
        # Without entry points there is nothing to bundle.
        self._lacks_bundler = with_bundler and with_contracts and not is_installed(home)
        if with_bundler and with_contracts and not self._lacks_bundler:
            entry_points = self.contracts.entry_points.values()
            self._bundler, self.bundler_url = bundler(self.url, entry_points, data / "logs" / "bundler.log", home)

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

    def keep_running(self, tasks: Tasks) -> None:
        """Restart the chain whenever it ends."""
        tasks.start("chain", lambda: self._chain.keep_running(after_restart=self._redeploy))

    async def start_bundler(self, tasks: Tasks) -> None:
        """Start the bundler and keep it running. A separate step, because no other part waits for it."""
        if self._lacks_bundler:
            self._display.note("bundler", MISSING)
        if self._bundler is not None:
            with self._display.part("bundler"):
                await self._bundler.start()
            tasks.start("bundler", self._bundler.keep_running)

    async def _redeploy(self) -> None:
        await deploy(self.url, self._steps)
        if self._bundler is not None:
            await self._bundler.stop()
