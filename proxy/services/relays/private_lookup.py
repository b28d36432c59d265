"""Looking up transactions for which the upstreams returned null, because only relays have them.

The account that sent a transaction privately sees it through the relays until it is in a block. Everybody else gets the null:
a flight that accounts share is answered for each of them apart, and such a reply is never cached.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time

import msgspec
import orjson

from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.errors import Fault, RateLimited
from proxy.services.accounts.metering import Meters, meter_of_task
from proxy.services.rpc.calls import RpcError, call_upstream
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Flight, next_id
from proxy.services.rpc.networks import Networks
from proxy.store.postgres.private_transactions import PrivateTransactionStore
from proxy.tasks import Tasks, client_of_task

log = logging.getLogger("penstock.relays")

# Methods whose null may mean that only a relay has the transaction, and the member of their results that has its hash.
LOOKED_UP = {"eth_getTransactionByHash": "hash", "eth_getTransactionReceipt": "transactionHash"}
_HASH = re.compile(r"0x[0-9a-fA-F]{64}", re.ASCII)
_hashes = msgspec.json.Decoder(list[str]).decode


class PrivateLookup:
    def __init__(self, relays: Networks, store: PrivateTransactionStore, tasks: Tasks, meters: Meters) -> None:
        """`meters`: charge the caller for the calls to relays."""
        self._relays = relays
        self._store = store
        self._tasks = tasks
        self._meters = meters
        # A call may have two attempts in flight: the second null changes nothing.
        self._open: set[Flight] = set()

    def __repr__(self) -> str:
        return f"<PrivateLookup {len(self._open)} open>"

    def take(self, dispatcher: Dispatcher, flight: Flight) -> bool:
        """Take over a flight whose result is null, if it names a transaction and was made for an account."""
        if flight in self._open:
            return True
        name = _name(flight.params) if flight.client and not flight.call.is_piece else ""
        if not name:
            return False
        self._open.add(flight)
        self._tasks.start_once("private lookup", lambda: self._answer(dispatcher, flight, name), of=next_id())
        return True

    async def _answer(self, dispatcher: Dispatcher, flight: Flight, name: str) -> None:
        """No exception leaves this, because the task would be run again."""
        client_of_task.set(flight.client)
        senders, found = frozenset[str](), jsonrpc.NULL
        left_s = flight.began + dispatcher.call_timeout_s - time.monotonic()
        meter = self._meters.open(flight.call.payer, within_s=left_s) if isinstance(flight.call.payer, Key) else None
        meter_of_task.set(meter)
        refusal: Fault | None = None
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                senders = await self._store.senders(dispatcher.state.network_id, bytes.fromhex(name[2:]))
                if flight.client in senders:
                    found = await self._find(dispatcher, flight, name)
        except RateLimited as exc:
            refusal = exc
        except (Fault, TimeoutError) as exc:
            log.info("looking up a private transaction failed", extra={"why": type(exc).__name__})
        except Exception:
            log.exception("looking up a private transaction failed")
        finally:
            self._open.discard(flight)
        if meter is not None:
            flight.charge(meter.key, meter.settle(0), refusal)
            flight.on_waited(meter.waited_s)
        if not flight.done:
            self._deliver(dispatcher, flight, senders, refusal or found)

    def _deliver(self, dispatcher: Dispatcher, flight: Flight, senders: frozenset[str], found: bytes | Fault) -> None:
        """Answer the account that made the call, and the others that wait for the same result: with null, or, if they have
        sent the transaction too, after a call of their own."""
        if flight.joined is not None and (senders or isinstance(found, Fault)):
            for caller, client in flight.take_joined():
                if client not in senders:
                    caller.on_result(jsonrpc.NULL)
                    continue
                alone = dispatcher.new_flight(flight.call.alone(client), caller, flight.began)
                caller.on_flight(alone)
                dispatcher.launch(alone, time.monotonic())
        if isinstance(found, Fault):
            dispatcher.complete_with_fault(flight, found)
        else:
            dispatcher.complete_cached(flight, found)

    async def _find(self, dispatcher: Dispatcher, flight: Flight, name: str) -> bytes:
        """The result of the first relay that has the transaction; null if none has."""
        relays = self._relays.find(dispatcher.state.network)
        policy, meter = flight.policy, meter_of_task.get()
        if relays is None:
            return jsonrpc.NULL
        params = b'["%b"]' % name.encode()
        for upstream in relays.upstreams:
            if not upstream.health.takes_calls(time.monotonic()):
                continue
            if meter is not None:
                await meter.pay(policy.units)
            reply = call_upstream(
                relays.dispatcher,
                relays.policies[policy.method.name],
                params,
                upstream=upstream,
                is_piece=True,
                client=flight.client,
            )
            try:
                found = await reply.result()
            except (RpcError, Fault):
                continue
            if _is_of(found, LOOKED_UP[policy.method.name], name):
                return found
        return jsonrpc.NULL


def _is_of(result: bytes, member: str, name: str) -> bool:
    """Whether a relay's result is about the transaction."""
    found = orjson.loads(result)
    return isinstance(found, dict) and str(found.get(member)).lower() == name


def _name(params: bytes) -> str:
    """The transaction's hash in lower case; empty if the params are not a hash."""
    try:
        (text,) = _hashes(params)
    except (msgspec.DecodeError, ValueError):
        return ""
    return text.lower() if _HASH.fullmatch(text) else ""
