"""Simulated clients on WebSockets: calls, subscriptions to heads and logs, slow reading, leaving, and resuming."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from tests.http_client import request
from tests.simulation.block_tree import CONTRACTS
from tests.simulation.event_rules import HeadEvents, LogEvents
from tests.simulation.oracle import Call
from tests.simulation.sim_clients import Connection, SimClient
from tests.simulation.sim_streams import masked_with

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


class Subscriber(SimClient):
    """Follows heads and logs to the end, over several connections if need be, and makes calls in between."""

    _heads: HeadEvents | None = None
    _logs: LogEvents | None = None

    async def run(self) -> None:
        await super().run()
        if self._heads is not None:
            self._heads.ended()
        if self._logs is not None:
            self._logs.ended()

    @property
    def _ends_s(self) -> float:
        return self._terms.listens_until_s

    async def _talk(self, connection: Connection) -> None:
        """One connection's life."""
        connection.write(request("GET", f"/v1/ws/{self._tree.name}", b"", key=self._account.key, **UPGRADE))
        async with asyncio.timeout(10.0):
            status, _, body = await connection.reply()
        if status != 101:
            self._oracle.handshake_refused(status, body)
            await self._pause(0.3)
            raise ConnectionResetError
        socket = _Socket(self, connection)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(socket.read())
            await self._converse(socket, reading)
            reading.cancel()
        self._leave_open(socket)
        if socket.is_lost:
            raise ConnectionResetError

    async def _converse(self, socket: _Socket, reading: asyncio.Task[None]) -> None:
        loop, rng = asyncio.get_running_loop(), self._rng
        await socket.subscribe_heads(self._heads)
        await socket.subscribe_logs(self._logs)
        while not reading.done() and loop.time() < self._ends_s:
            if loop.time() < self._terms.until_s:
                socket.call(self._read())
            if self._terms.may_leave and rng.random() < 0.01 and loop.time() < self._terms.until_s:
                socket.abort()
                return
            for ended in socket.take_ended():
                if isinstance(ended, HeadEvents):
                    await socket.subscribe_heads(ended)
                else:
                    await socket.subscribe_logs(ended)
            await asyncio.wait([reading], timeout=rng.expovariate(1 / 0.15))

    def _leave_open(self, socket: _Socket) -> None:
        """Calls without a reply: the socket was lost, or the client left."""
        for call in [*socket.waiting.values()]:
            if call in self._open:
                self._open.remove(call)
            if socket.is_lost:
                self._oracle.lost(call)
            else:
                self._oracle.left(call)

    # For the socket

    def frame(self, payload: bytes, opcode: int = TEXT) -> bytes:
        mask = self._rng.randbytes(4)
        size = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
        return bytes([0x80 | opcode]) + size + mask + masked_with(mask, payload)

    def ask(self, method: str, params: list[Any]) -> Call:
        return self._ask(method, params)

    def answered(self, call: Call, reply: dict[str, Any]) -> None:
        if call in self._open:
            self._open.remove(call)
        call.directives["X-Socket"] = "yes"
        self._oracle.messaged(call, reply)

    def subscribed_heads(self, name: str) -> HeadEvents:
        if self._heads is None:
            self._heads = HeadEvents(self._oracle, self._tree, self.name)
        self._heads.begins(name)
        return self._heads

    def subscribed_logs(self, name: str, wanted: dict[str, Any]) -> LogEvents:
        if self._logs is None:
            self._logs = LogEvents(self._oracle, self._tree, self.name, wanted)
        self._logs.begins(name)
        return self._logs

    def event_arrived(self) -> None:
        self._account.events += 1

    def subscription_ended(self) -> None:
        """The service may give up a subscription while upstreams fail, and says so."""
        if self._oracle.is_healed:
            self.violate("events", "a subscription was ended, and no upstream fails")

    def violate(self, rule: str, text: str) -> None:
        self._oracle.violate(rule, f"{self.name} of {self._account.name}: {text}")

    def closed(self, code: int) -> None:
        self._oracle.socket_closed(self.name, code)

    async def doze(self) -> None:
        """Now and then the client does not read for a while."""
        if self._terms.may_leave and self._rng.random() < 0.01:
            await asyncio.sleep(self._rng.uniform(0.0, 2.0))


class _Socket:
    """One connection after its handshake."""

    def __init__(self, client: Subscriber, connection: Connection) -> None:
        self._client, self._connection = client, connection
        self.waiting: dict[Any, Call] = {}
        self._events: dict[str, HeadEvents | LogEvents] = {}
        # Subscriptions that the service has ended, and that begin again.
        self._ended: list[HeadEvents | LogEvents] = []
        self._on_result: dict[Any, Any] = {}
        self.is_lost = False

    def call(self, call: Call) -> None:
        self.waiting[call.id] = call
        body = {"jsonrpc": "2.0", "id": call.id, "method": call.method, "params": call.params}
        self._connection.write(self._client.frame(orjson.dumps(body)))

    def abort(self) -> None:
        self._connection.abort()

    def take_ended(self) -> list[HeadEvents | LogEvents]:
        ended, self._ended = self._ended, []
        return ended

    async def subscribe_heads(self, known: HeadEvents | None) -> None:
        """From where an earlier connection ended, or from now on."""
        more = [] if known is None or known.next_block is None else [{"fromBlock": hex(known.next_block)}]
        call = self._client.ask("eth_subscribe", ["newHeads", *more])
        self._on_result[call.id] = lambda name: self._events.update({name: self._client.subscribed_heads(name)})
        self.call(call)

    async def subscribe_logs(self, known: LogEvents | None) -> None:
        wanted: dict[str, Any] = {"address": CONTRACTS[0]}
        more = {} if known is None or known.next_block is None else {"fromBlock": hex(known.next_block)}
        call = self._client.ask("eth_subscribe", ["logs", {**wanted, **more}])
        self._on_result[call.id] = lambda name: self._events.update({name: self._client.subscribed_logs(name, wanted)})
        self.call(call)

    async def read(self) -> None:
        try:
            while True:
                opcode, payload = await self._connection.frame()
                if opcode == PING:
                    self._connection.write(self._client.frame(payload, PONG))
                elif opcode == CLOSE:
                    self._client.closed(int.from_bytes(payload[:2], "big"))
                    self.is_lost = True
                    return
                elif opcode == TEXT:
                    self._receive(orjson.loads(payload))
                await self._client.doze()
        except ConnectionError:
            self.is_lost = True

    def _receive(self, message: Any) -> None:
        if "method" in message:
            params = message["params"]
            found = self._events.get(params["subscription"])
            if found is None:
                self._client.violate("events", f"an event of an unknown subscription: {str(message)[:200]}")
            else:
                found.on_event(params["result"])
                self._client.event_arrived()
            return
        data = message.get("error", {}).get("data") or {}
        if message.get("id") is None and data.get("ended") and data["subscription"] in self._events:
            self._ended.append(self._events.pop(data["subscription"]))
            self._client.subscription_ended()
            return
        call = self.waiting.pop(message.get("id"), None)
        if call is None:
            self._client.violate("one-reply", f"a message that answers no call: {str(message)[:200]}")
            return
        if "result" in message and call.id in self._on_result:
            self._on_result[call.id](message["result"])
        self._client.answered(call, message)
