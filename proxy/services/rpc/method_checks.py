"""Finds out which client an upstream runs, and which methods it does not have.

`rpc_modules` lists the groups of methods that are switched on. A group that is missing there is a reliable no; one that is
listed says little about a single method. So a few methods that clients often lack are called without params: one that exists
refuses the params, one that does not is not found.

This only removes methods, and for a while: an upstream that lacks a method still gets the call if no other takes it. Methods
that the settings of the upstream allow are never removed. All of it is repeated every hour while the network is in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from proxy.chains.families import family_of
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.probe import Probe
from proxy.services.rpc.probing import result_of
from proxy.wire.upstream import Upstream

EVERY_S: Final = 3600.0
# How soon an upstream is asked again that did not answer.
AGAIN_S: Final = 60.0
# Bytes of a client's name that are kept.
LONGEST_NAME: Final = 80

_modules = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class MethodChecks:
    """The clients and methods of one network's upstreams."""

    def __init__(self, state: NetworkState, clock: Callable[[], float]) -> None:
        self._state = state
        self._clock = clock
        self._questions = family_of(state.network).detection
        self._due_at: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<MethodChecks {self._state.network_id}>"

    async def check(self) -> None:
        """Ask the upstreams that are due."""
        if self._questions is None:
            return
        for upstream in self._state.upstreams:
            health, now = upstream.health, self._clock()
            is_up = bool(health.head) and not health.silent and not health.withheld and now >= health.rests_until
            if is_up and now >= self._due_at.get(health.index, -math.inf):
                self._due_at[health.index] = math.inf
                is_answered = False
                try:
                    is_answered = await self._ask(upstream)
                finally:
                    self._due_at[health.index] = self._clock() + (EVERY_S if is_answered else AGAIN_S)

    async def _ask(self, upstream: Upstream) -> bool:
        """Returns whether it answered."""
        questions = self._questions
        assert questions is not None
        named = Probe(upstream, questions.client)
        name = _name_in(await result_of(named))
        if not named.is_answered:
            return False
        asked = Probe(upstream, questions.modules)
        groups = _groups_in(await result_of(asked))
        missing = {each for each in self._state.methods if groups and each.partition("_")[0] not in groups}
        missing |= {each for each in questions.probes if each not in missing and await _is_missing(upstream, each)}
        upstream.health.client_reported(name, missing, until=self._clock() + EVERY_S + AGAIN_S)
        return True


async def _is_missing(upstream: Upstream, method: str) -> bool:
    probe = Probe(upstream, method)
    return await result_of(probe) is None and probe.lacks_method


def _name_in(result: bytes | None) -> str:
    try:
        return _text(result or b'""')[:LONGEST_NAME]
    except _UNREADABLE:
        return ""


def _groups_in(result: bytes | None) -> Collection[str]:
    """The groups of methods that are switched on; none if the upstream does not say."""
    try:
        return frozenset(_modules(result or b"{}"))
    except _UNREADABLE:
        return ()
