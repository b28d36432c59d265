"""The development chain with its contracts and its bundler.

The chain's state is lost when it ends. After every start the contracts are deployed again, at the same addresses, and the
bundler is restarted, because its state belongs to the old chain.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from proxy.dev.bundler import MISSING, bundler, is_installed
from proxy.dev.chain import development_chain
from proxy.dev.child import Child
from proxy.dev.contracts import DevContracts, everything
from proxy.dev.display import Display
from proxy.dev.recipe import RecipeStep
from proxy.errors import StartError
from proxy.tasks import Tasks

# A chain that takes longer for one reply has hung.
REPLY_S = 30.0
RECEIPTS_AT_ONCE = 100


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
                await _deploy(self.url, self._steps)

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
        await _deploy(self.url, self._steps)
        if self._bundler is not None:
            await self._bundler.stop()


async def _deploy(url: str, steps: list[RecipeStep]) -> None:
    """Send the steps in order and check that each one succeeded."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=REPLY_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            sent = [(step, await _done(session, url, step)) for step in steps]
            await _check_receipts(session, url, [(step.what, hash_) for step, hash_ in sent if step.sends])
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise StartError([f"contracts: the development chain at {url} failed: {exc!r}"]) from None


async def _done(session: aiohttp.ClientSession, url: str, step: RecipeStep) -> Any:
    call = {"jsonrpc": "2.0", "id": 1, "method": step.method, "params": step.params}
    async with session.post(url, json=call) as response:
        answer = await response.json()
    if "result" not in answer:
        raise StartError([f"contracts: {step.what}: {answer.get('error')}"])
    return answer["result"]


async def _check_receipts(session: aiohttp.ClientSession, url: str, sent: list[tuple[str, str]]) -> None:
    """Check the receipts: a reverted transaction is mined too, and only its receipt shows the failure."""
    for first in range(0, len(sent), RECEIPTS_AT_ONCE):
        part = sent[first : first + RECEIPTS_AT_ONCE]
        calls = [
            {"jsonrpc": "2.0", "id": at, "method": "eth_getTransactionReceipt", "params": [hash_]}
            for at, (_, hash_) in enumerate(part)
        ]
        async with session.post(url, json=calls) as response:
            answers = {answer["id"]: answer.get("result") or {} for answer in await response.json()}
        if failed := [what for at, (what, _) in enumerate(part) if answers[at].get("status") != "0x1"]:
            raise StartError([f"contracts: failed on the development chain: {', '.join(failed)}"])
