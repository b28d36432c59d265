"""Looking up transactions for which the upstreams returned null, because only relays have them.

The account that sent a transaction privately sees it through the relays until it is in a block. Everybody else gets the null:
a flight that accounts share is answered for each of them apart, and such a reply is never cached.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import orjson

from proxy.core import jsonrpc
from proxy.errors import Fault
from proxy.services.accounts.metering import Meters, meter_of_task
from proxy.services.relays.private_senders import PrivateSenders
from proxy.services.rpc.calls import RpcError, call_upstream
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.networks import Networks
from proxy.services.rpc.null_searches import NullSearches, hash_in
from proxy.tasks import Tasks

# Methods whose null may mean that only a relay has the transaction, and the member of their results that has its hash.
LOOKED_UP = {"eth_getTransactionByHash": "hash", "eth_getTransactionReceipt": "transactionHash"}


class PrivateLookup:
    def __init__(self, relays: Networks, senders: PrivateSenders, tasks: Tasks, meters: Meters) -> None:
        """`meters`: charge the caller for the calls to relays."""
        self._relays = relays
        self._senders = senders
        self._searches = NullSearches("private lookup", tasks, meters)

    def __repr__(self) -> str:
        return f"<PrivateLookup {self._searches!r}>"

    def take(self, dispatcher: Dispatcher, flight: Flight) -> bool:
        """Take over a flight whose result is null, if one of the accounts that wait for it may have sent the transaction."""
        if flight in self._searches:
            return True
        name = hash_in(flight.params) if flight.client and not flight.call.is_piece else None
        state = dispatcher.state
        if name is None or all(self._senders.is_ruled_out(state, each, name) for each in _accounts(flight)):
            return False
        # Whether each account that waits has sent the transaction.
        has_sent: dict[str, bool] = {}
        self._searches.start(
            dispatcher,
            flight,
            lambda: self._search(dispatcher, flight, name, has_sent),
            lambda result: _deliver(dispatcher, flight, has_sent, result),
        )
        return True

    async def _search(self, dispatcher: Dispatcher, flight: Flight, name: bytes, has_sent: dict[str, bool]) -> bytes:
        result, client = jsonrpc.NULL, flight.client
        # Others may join the call until the end.
        while open_ := [each for each in _accounts(flight) if each not in has_sent]:
            for account in open_:
                has_sent[account] = await self._senders.has_sent(dispatcher.state, account, name)
                if account == client and has_sent[account]:
                    result = await self._find(dispatcher, flight, f"0x{name.hex()}")
        return result

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
                result = await reply.result()
            except (RpcError, Fault):
                continue
            if _is_of(result, LOOKED_UP[policy.method.name], name):
                return result
        return jsonrpc.NULL


def _is_of(result: bytes, member: str, name: str) -> bool:
    """Whether a relay's result is about the transaction."""
    transaction = orjson.loads(result)
    return isinstance(transaction, dict) and str(transaction.get(member)).lower() == name


def _accounts(flight: Flight) -> tuple[str, ...]:
    return (flight.client, *flight.joined_by)


def _deliver(dispatcher: Dispatcher, flight: Flight, has_sent: Mapping[str, bool], result: bytes | Fault) -> None:
    """Answer the account that made the call, and the others that wait for the same result: with null, or, if they have sent
    the transaction too, after a call of their own, for which they pay."""
    if flight.joined is not None and (any(has_sent.values()) or isinstance(result, Fault)):
        for caller, call in flight.take_joined():
            # An account that the search did not come to finds out for itself.
            if not has_sent.get(call.client, True):
                caller.on_result(jsonrpc.NULL)
                continue
            alone = dispatcher.new_flight(call, caller, flight.began)
            caller.on_source("miss", alone.block)
            caller.on_flight(alone)
            dispatcher.launch(alone, time.monotonic())
    if isinstance(result, Fault):
        dispatcher.complete_with_fault(flight, result)
    else:
        dispatcher.complete_cached(flight, result)
