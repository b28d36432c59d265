"""A client of the fleet that costs little: one kept connection, one call at a time, at a steady pace."""

from __future__ import annotations

import asyncio
import time

from bench.fleet.ledger import FleetLedger
from bench.fleet.programs import NETWORK

# Calls per second of one caller, if they are answered in time.
PACE = 50.0
TIMEOUT_S = 30.0
BODY = b'{"jsonrpc":"2.0","id":1,"method":"eth_blockNumber","params":[]}'


class FleetCaller:
    def __init__(self, ledger: FleetLedger, *, port: int, key: str) -> None:
        self._ledger = ledger
        self._port = port
        self._request = (
            f"POST /v1/rpc/{NETWORK} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-API-Key: {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
        ).encode() + BODY

    def __repr__(self) -> str:
        return f"<FleetCaller of port {self._port}>"

    async def run(self) -> None:
        """Make calls until cancelled. A call without a reply costs its connection."""
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError as exc:
                self._ledger.failures[type(exc).__name__] += 1
                await asyncio.sleep(1 / PACE)
                continue
            try:
                await self._use(reader, writer)
            except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as exc:
                self._ledger.failures[type(exc).__name__] += 1
            finally:
                writer.close()

    async def _use(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        due, is_kept = time.monotonic(), True
        while is_kept:
            due = max(due + 1 / PACE, time.monotonic() - 1.0)
            await asyncio.sleep(due - time.monotonic())
            self._ledger.in_flight += 1
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    writer.write(self._request)
                    is_kept = self._note(*await _reply(reader))
            finally:
                self._ledger.in_flight -= 1

    def _note(self, head: bytes, body: bytes) -> bool:
        """Count the reply. Returns whether the connection can be used again."""
        status = head[9:12]
        if status == b"200" and b'"result"' in body:
            self._ledger.answered += 1
        else:
            self._ledger.failures[status.decode()] += 1
        return b"\r\nconnection: close" not in head


async def _reply(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)
