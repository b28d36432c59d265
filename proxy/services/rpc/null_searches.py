"""Searches for results that upstreams returned as null: a transaction that only relays have, an operation that is in a block.

A search takes over the flight of the call. It has what is left of the call's time, and the caller's key pays for the calls that
it makes. It ends once: with a result, with null if it failed, or with a refusal of the key's limits.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable

import msgspec

from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.errors import Fault, RateLimited
from proxy.services.accounts.metering import Meters, meter_of_task
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Flight, next_id
from proxy.tasks import Tasks, client_of_task

log = logging.getLogger("penstock.null_searches")

Search = Callable[[], Awaitable[bytes]]
Deliver = Callable[[bytes | Fault], None]

_hashes = msgspec.json.Decoder(list[str]).decode
_HASH = re.compile(r"0x[0-9a-fA-F]{64}", re.ASCII)


class NullSearches:
    def __init__(self, what: str, tasks: Tasks, meters: Meters) -> None:
        """`what`: the name of the task, such as `operation lookup`."""
        self._what = what
        self._tasks = tasks
        self._meters = meters
        # A call may have two attempts in flight: the second null changes nothing.
        self._open: set[Flight] = set()

    def __repr__(self) -> str:
        return f"<NullSearches {self._what}, {len(self._open)} open>"

    def __contains__(self, flight: Flight) -> bool:
        return flight in self._open

    def start(self, dispatcher: Dispatcher, flight: Flight, search: Search, deliver: Deliver) -> None:
        """`deliver` ends the flight with the outcome, unless its callers have left."""
        self._open.add(flight)
        self._tasks.start_once(self._what, lambda: self._run(dispatcher, flight, search, deliver), of=next_id())

    async def _run(self, dispatcher: Dispatcher, flight: Flight, search: Search, deliver: Deliver) -> None:
        """No exception leaves this, because the task would be run again."""
        client_of_task.set(flight.client)
        left_s = flight.began + dispatcher.call_timeout_s - time.monotonic()
        meter = self._meters.open(flight.call.payer, within_s=left_s) if isinstance(flight.call.payer, Key) else None
        meter_of_task.set(meter)
        result: bytes | Fault = jsonrpc.NULL
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                result = await search()
        except RateLimited as refusal:
            result = refusal
        except (Fault, RpcError, TimeoutError) as exc:
            log.info("a search for a null result failed", extra={"what": self._what, "why": type(exc).__name__})
        except Exception:
            log.exception("a search for a null result failed", extra={"what": self._what})
        finally:
            self._open.discard(flight)
        if meter is not None:
            flight.charge(meter.key, meter.settle(0), result if isinstance(result, Fault) else None)
            flight.on_waited(meter.waited_s)
        if not flight.done:
            deliver(result)


def hash_in(params: bytes) -> bytes | None:
    """The hash that is the only one of the params; None if they are something else."""
    try:
        (text,) = _hashes(params)
    except (msgspec.DecodeError, ValueError):
        return None
    return bytes.fromhex(text[2:]) if _HASH.fullmatch(text) else None
