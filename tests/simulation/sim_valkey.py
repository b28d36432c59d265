"""A simulated Valkey: the model behind connections that speak RESP3, with a clock of its own.

It can hang, lose everything in a restart, and have its clock set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hiredis

from tests.simulation.memory_network import Address, MemoryNetwork, Weather
from tests.simulation.seams import EPOCH_NS, Clock
from tests.simulation.valkey_model import Refused, ValkeyModel


class SimValkey:
    def __init__(self, address: Address, network: MemoryNetwork, clock: Clock, weather: Weather) -> None:
        self.address, self._network, self._clock, self._weather = address, network, clock, weather
        self._model = ValkeyModel(self._time)
        self._skew_s = 0.0
        self._connections: dict[_Connection, None] = {}
        self._hangs = False

    def __repr__(self) -> str:
        return f"<SimValkey {len(self._connections)} connections, {self._model!r}>"

    @property
    def url(self) -> str:
        return f"redis://{self.address[0]}:{self.address[1]}/0"

    def _time(self) -> float:
        """As TIME reports it, in whole microseconds."""
        seconds, ns = divmod(EPOCH_NS + self._clock.ns + round(self._skew_s * 1e9), 10**9)
        return seconds + ns // 1000 / 1e6

    def open(self) -> None:
        self._network.set_weather(self.address, self._weather)
        self._network.listen(lambda: _Connection(self), self.address)

    def endures(self, weather: Weather) -> None:
        """Its connections have these faults from now on."""
        self._weather = weather
        self._network.set_weather(self.address, weather)

    def heal(self, weather: Weather) -> None:
        self.endures(weather)
        self.thaw()

    # Faults

    def set_clock(self, skew_s: float) -> None:
        self._network.history.fault("valkey", "valkey clock set", f"to {skew_s:+.3f} s")
        self._skew_s = skew_s

    def restart(self) -> None:
        """Everything that it held is lost."""
        self._network.history.fault("valkey", "valkey restarted")
        self._model.forget_everything()
        for connection in tuple(self._connections):
            connection.drop()

    def hang(self) -> None:
        self._network.history.fault("valkey", "valkey hangs")
        self._hangs = True

    def thaw(self) -> None:
        """Answer the commands that have arrived meanwhile on connections that are still open."""
        self._hangs = False
        for connection in tuple(self._connections):
            connection.answer()

    @property
    def hangs(self) -> bool:
        return self._hangs

    # Connections

    def joined(self, connection: _Connection) -> None:
        self._connections[connection] = None

    def left(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)

    def reply_to(self, words: list[bytes]) -> bytes:
        try:
            return packed(self._model.execute(words, self._publish))
        except Refused as exc:
            return b"-%b\r\n" % str(exc).encode()

    def _publish(self, channel: bytes, message: bytes) -> int:
        listening = [each for each in self._connections if channel in each.channels]
        for each in listening:
            each.push([b"message", channel, message])
        return len(listening)


class _Connection(asyncio.Protocol):
    _transport: asyncio.Transport

    def __init__(self, valkey: SimValkey) -> None:
        self._valkey = valkey
        # Commands are arrays of strings, as replies are.
        self._commands = hiredis.Reader()
        self.channels: dict[bytes, None] = {}

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._valkey.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._valkey.left(self)

    def drop(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._commands.feed(data)
        self.answer()

    def answer(self) -> None:
        while not self._valkey.hangs and (words := self._commands.gets()) is not False:
            self._transport.write(self._reply(words))

    def _reply(self, words: list[bytes]) -> bytes:
        if words[0] == b"HELLO":
            return b"%1\r\n$5\r\nproto\r\n:3\r\n"
        if words[0] == b"SUBSCRIBE":
            self.channels[words[1]] = None
            return _pushed([b"subscribe", words[1], len(self.channels)])
        return self._valkey.reply_to(words)

    def push(self, parts: list[Any]) -> None:
        self._transport.write(_pushed(parts))


def _pushed(parts: list[Any]) -> bytes:
    return b">%d\r\n%b" % (len(parts), b"".join(map(packed, parts)))


_PACKED: dict[type, Callable[[Any], bytes]] = {
    int: lambda value: b":%d\r\n" % value,
    str: lambda value: b"+%b\r\n" % value.encode(),
    bytes: lambda value: b"$%d\r\n%b\r\n" % (len(value), value),
    list: lambda value: b"*%d\r\n%b" % (len(value), b"".join(map(packed, value))),
    type(None): lambda _: b"_\r\n",
}


def packed(value: Any) -> bytes:
    """A value in RESP3."""
    return _PACKED[type(value)](value)
