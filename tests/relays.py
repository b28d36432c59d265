"""Private relays: they check signatures, keep transactions, and show them by hash until they are mined."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from eth_account import Account
from eth_account.messages import encode_defunct
from sha3 import keccak_256


class Relay:
    """A server. With a `signer`, it accepts only requests that this address has signed, as Flashbots' relay does, and takes
    eth_sendPrivateTransaction; without one it is plain."""

    def __init__(self, signer: str = "") -> None:
        self.signer = signer
        self.port = 0
        # The raw transactions by their hashes.
        self.held: dict[str, str] = {}
        self.calls: list[dict[str, Any]] = []
        self.unsigned = 0
        # An error for every transaction.
        self.refuses = ""
        # How long it takes to reply to a transaction that it has.
        self.pause_s = 0.0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/relay"

    async def open(self) -> None:
        application = web.Application()
        application.router.add_post("/relay", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.signer and self._signed_by(request.headers.get("X-Flashbots-Signature", ""), body) != self.signer:
            self.unsigned += 1
            return web.json_response({"error": "signature is not valid"}, status=403)
        call = orjson.loads(body)
        self.calls.append(call)
        outcome = self._outcome(call["method"], call["params"])
        await asyncio.sleep(self.pause_s)
        return web.json_response({"jsonrpc": "2.0", "id": call["id"], **outcome})

    def _signed_by(self, header: str, body: bytes) -> str:
        """Verified with eth-account, which has no part in making it."""
        address, _, signature = header.partition(":")
        message = encode_defunct(text="0x" + keccak_256(body).hexdigest())
        try:
            found = str(Account.recover_message(message, signature=signature))
        except ValueError:
            return ""
        return found if found == address else ""

    def _outcome(self, method: str, params: list[Any]) -> dict[str, Any]:
        match method:
            case "eth_sendPrivateTransaction" if self.signer:
                return self._keep(params[0]["tx"])
            case "eth_sendRawTransaction" if not self.signer:
                return self._keep(params[0])
            case "eth_cancelPrivateTransaction" if self.signer:
                return {"result": self.held.pop(params[0]["txHash"], None) is not None}
            case "eth_getTransactionByHash":
                found = {"hash": params[0], "blockNumber": None, "blockHash": None}
                return {"result": found if params[0] in self.held else None}
            case "eth_getTransactionReceipt":
                return {"result": None}
            case _:
                return {"error": {"code": -32601, "message": f"the method {method} does not exist"}}

    def _keep(self, raw: str) -> dict[str, Any]:
        if self.refuses:
            return {"error": {"code": -32000, "message": self.refuses}}
        name = "0x" + keccak_256(bytes.fromhex(raw[2:])).hexdigest()
        self.held[name] = raw
        return {"result": name}


@asynccontextmanager
async def relays(*signers: str) -> AsyncIterator[list[Relay]]:
    """One relay for each signer; an empty text for a plain one."""
    found = [Relay(each) for each in signers]
    for each in found:
        await each.open()
    try:
        yield found
    finally:
        for each in found:
            await each.close()
