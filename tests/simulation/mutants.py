"""Planted bugs. The simulator must find each of them: they are its own test.

Some were real and are fixed; others are mistakes that someone could make. A mutant changes one place of one module while it is
imported, in a process of its own. A seed that finds a bug is kept beside this file, in `seeds.json`, by the name of the bug:
`python -m tests.simulation --mutants` tries that seed first, and writes down another one if it no longer finds the bug.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

SEEDS = Path(__file__).with_name("seeds.json")


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    module: str
    old: str
    new: str
    # How it showed, if it was a real bug.
    showed: str = ""


_RPC, _CORE, _FRONT, _WIRE, _FEED = (
    "proxy.services.rpc",
    "proxy.core",
    "proxy.web.front",
    "proxy.wire",
    "proxy.services.feed",
)

MUTANTS = {
    mutant.name: mutant
    for mutant in (
        # Real ones, found by the simulator.
        Mutant(
            "min-block-keeps-cache",
            f"{_RPC}.dispatcher",
            "directives.min_block > self.state.tip:",
            "False:",
            showed="a cached reply from before the block of X-Min-Block followed it",
        ),
        Mutant(
            "min-block-from-liar",
            f"{_RPC}.dispatcher",
            "has_block = health.head >= directives.min_block and not health.ahead",
            "has_block = health.head >= directives.min_block",
            showed="X-Min-Block was served by an upstream that reports an impossible head",
        ),
        Mutant(
            "liar-until-next-poll",
            f"{_RPC}.network_state",
            "            self.heads.place(health, now)\n",
            "            pass\n",
            showed="an impossible head attracted calls, and X-Block-Number named a block that was not reached",
        ),
        Mutant(
            "wrong-chain-forgiven",
            f"{_RPC}.tracker",
            'is_ours = health.standing != "wrong_chain"',
            "is_ours = True",
            showed="an upstream of another chain got calls after it refused to name its chain",
        ),
        Mutant(
            "block-there-and-missing",
            f"{_RPC}.block_waits",
            "    if min_block <= newest:\n",
            "    if False:\n",
            showed="X-Min-Block got a 503 for a missing block, although the block was there and no upstream took calls",
        ),
        Mutant(
            "repeated-without-block",
            f"{_RPC}.dispatcher",
            "is_left_out = left_out >> health.index & 1",
            "is_left_out = 0",
            showed="a call with X-Min-Block that hung was repeated at an upstream that was back, without the block",
        ),
        Mutant(
            "impossible-head-asked-again",
            f"{_RPC}.dispatcher",
            "                is_sent = flight.is_under_way() or self._send_another(flight, now, is_unrelated=True)\n"
            "                if not is_sent and not self._send_another(flight, now):\n",
            "                if True:\n",
            showed="all attempts went to the upstream that reported an impossible head: only it had the newest block",
        ),
        Mutant(
            "same-operator-asked-again",
            f"{_RPC}.dispatcher",
            "related = of_same_operators(self.state, flight.tried) if is_unrelated else 0",
            "related = 0",
            showed="of five upstreams, three of two operators reported impossible heads, and a call was sent to these three",
        ),
        Mutant(
            "batch-takes-later-attempt",
            f"{_RPC}.upstream_batch",
            " and flight.began_at(upstream) == self.began",
            "",
            showed="the late reply of a batch ended a later attempt at the same upstream",
        ),
        # The check before it, that the upstream is still on the network's branch, is no longer planted: with this one in place
        # it only matters for forks that replace blocks which were final when the call was sent, and no simulated fork does.
        Mutant(
            "cached-when-final-meanwhile",
            f"{_RPC}.network_state",
            "min(self.heads.final, flight.block - self.heads.finality_blocks)",
            "self.heads.final",
            showed="an upstream read state on a branch of its own, returned to the network's, and replied: the result was kept",
        ),
        Mutant(
            "any-upstream-without-head",
            f"{_CORE}.routing",
            "return _newest(fit) if needs_head and not needs.head else fit",
            "return fit",
            showed="while no upstream was known to have the newest block, a call went to one that was behind the others",
        ),
        Mutant(
            "holder-not-told",
            f"{_RPC}.network_state",
            "if not holder or tip < self.heads.tip:",
            "if True:",
            showed="another process had learned of a block, and this one did not know which upstream had it",
        ),
        # It also delayed logs, while a source whose polls fail was asked for them first. That is no longer planted: dead
        # sockets are found before the events of a run are compared.
        Mutant(
            "dead-socket-found-late",
            f"{_WIRE}.websocket_client",
            "HEARTBEAT_S = 10.0",
            "HEARTBEAT_S = 20.0",
            showed="a socket of calls was half-open, and all filters of its upstream failed for half a minute",
        ),
        Mutant(
            "cancelled-probe-kept",
            f"{_RPC}.probing",
            "    finally:\n",
            "    if True:\n",
            showed="a look at an upstream was cancelled, and its call to that upstream held the connection of all later ones",
        ),
        Mutant(
            "sent-behind-hung-call",
            f"{_WIRE}.http_upstream",
            "if connection is not None and _is_held_up(connection):",
            "if False:",
            showed="a call was sent on a connection whose oldest call had timed out, and timed out as well",
        ),
        Mutant(
            "two-ports-two-witnesses",
            f"{_CORE}.heads",
            "return len(witnesses) < 2 and",
            "return False and",
            showed="while other upstreams were out, two of one operator confirmed each other's impossible head",
        ),
        Mutant(
            "refused-beside-trial",
            f"{_RPC}.rest_waits",
            "is_tried = any(each.is_tried(now) for each in members)",
            "is_tried = False",
            showed="after an outage of the only upstream, one call was the trial and those beside it got a 503",
        ),
        Mutant(
            "repeated-at-each-look",
            f"{_RPC}.dispatcher",
            " and health.back_at > flight.last_sent(upstream)",
            "",
            showed="a call that hung was sent again and again to an upstream that was back and failed at once",
        ),
        Mutant(
            "retried-below-new-head",
            f"{_RPC}.dispatcher",
            "return max(call.least_head, state.heads.tip) if call.reports_head else call.least_head",
            "return call.least_head",
            showed="a block came while a call at latest was under way, and its retries went to upstreams without it: a 503",
        ),
        Mutant(
            "holder-asked-once",
            f"{_RPC}.dispatcher",
            "same = self.choose(flight.call, now, flight.call.excluded)",
            "same = None",
            showed="the only upstream with the newest block reported an impossible one every other time: a 503",
        ),
        Mutant(
            "older-state-asked-elsewhere",
            f"{_RPC}.dispatcher",
            "                self._after_failure(flight, now, reason, sent=True, needs_block=True)\n",
            "                if flight.is_under_way() or not self._send_another(flight, now):\n"
            "                    self._after_failure(flight, now, reason, sent=True)\n",
            showed="the upstream with the newest block had read the state before it, and the retries went to those behind it",
        ),
        Mutant(
            "closed-connection-counts",
            f"{_RPC}.flights",
            "self.free_tries = 1",
            "self.free_tries = 0",
            showed="with X-Retry: 1, a connection that was closed between calls took the only retry",
        ),
        Mutant(
            "epochs-after-their-end",
            "proxy.store.shared_memory.lease_records",
            "is_leased = self.is_leased(now)",
            "is_leased = True",
            showed="after Valkey's clock was set back by a second, a host dropped every lease at once, and used up the limit",
        ),
        # Consistency
        Mutant(
            "cache-survives-head",
            f"{_RPC}.network_state",
            "        self.replies.head_moved(time.monotonic())\n        self.flights.clear()\n        short_hash =",
            "        short_hash =",
        ),
        Mutant(
            "cached-after-head-moved",
            f"{_RPC}.network_state",
            "        if flight.moves != self.replies.moves:\n            return False\n",
            "",
        ),
        Mutant("tip-not-raised", f"{_CORE}.heads", "self.tip = max(self.tip, number)", "pass"),
        Mutant(
            "any-head-plausible",
            f"{_CORE}.heads",
            "return not self.agreed or number <= self._furthest(now)",
            "return True",
        ),
        Mutant(
            "other-chain-accepted",
            f"{_RPC}.tracker",
            "is_ours = lookup.identity(answer.values) == expected",
            "is_ours = True",
        ),
        Mutant("key-without-params", f"{_CORE}.caching", "    text = method + params\n", "    text = method\n"),
        Mutant(
            "key-cut-short", f"{_CORE}.caching", "    text = method + params\n", "    text = (method + params)[:60]\n"
        ),
        Mutant("quorum-of-one", f"{_CORE}.verification", "return len(agreed) >= self.needed", "return True"),
        Mutant(
            "trial-serves-calls",
            "proxy.compose.networks",
            "if not each[1].shadow or each[1].canary]",
            "]",
        ),
        # Replies
        Mutant(
            "foreign-reply-accepted",
            f"{_CORE}.jsonrpc",
            "if bytes(reply.id) != id and not is_anonymous_error(reply):",
            "if False:",
        ),
        Mutant(
            "reading-never-resumed",
            f"{_WIRE}.http_connection",
            "            if not self._reads_soon:\n                self.transport.resume_reading()",
            "            pass",
        ),
        Mutant(
            "writes-reversed",
            f"{_WIRE}.write_buffer",
            "for owner, data in queue:",
            "for owner, data in reversed(queue):",
        ),
        Mutant("timeout-ignored", f"{_RPC}.dispatcher", "if not flight.done and not flight.streaming:", "if False:"),
        Mutant(
            "no-call-timeout", f"{_RPC}.dispatcher", "elif now - flight.began > self.call_timeout_s:", "elif False:"
        ),
        # Writes
        Mutant(
            "write-repeated",
            f"{_RPC}.method_policy",
            'self.may_repeat = method.kind == "read"',
            "self.may_repeat = True",
        ),
        # Limits and charges
        Mutant("bucket-of-three-seconds", f"{_CORE}.limits", "    full = now - 1.0\n", "    full = now - 3.0\n"),
        Mutant(
            "bucket-charged-twice", f"{_CORE}.limits", "    requests += request_s\n", "    requests += 2 * request_s\n"
        ),
        Mutant(
            "failure-charged",
            "proxy.web.call_accounting",
            "        return further",
            "        return units",
        ),
        Mutant(
            "crowd-first",
            f"{_WIRE}.waiting_calls",
            "if fewest < 0 or count < fewest:",
            "if fewest < 0 or count > fewest:",
        ),
        # The fleet
        Mutant(
            "lease-doubled",
            "proxy.store.valkey.lease_client",
            "            requests * sent.costs[0],\n",
            "            2 * requests * sent.costs[0],\n",
        ),
        Mutant(
            "no-limit-without-valkey",
            "proxy.store.shared_memory.leased_buckets",
            "        if wait > TOLERANCE_S:\n            return wait\n        cells[at + EDGE_R] = requests",
            "        cells[at + EDGE_R] = requests",
        ),
        Mutant(
            "heads-of-others-ignored",
            f"{_RPC}.head_exchange",
            "            state.follow(int(tip), int(short_hash), is_lower=kind == LOWERED, holder=holder)",
            "            pass",
        ),
        # Memory
        Mutant("reply-memory-kept", f"{_RPC}.held_body", "self._replies.give_back(self._account, counted)", "pass"),
        Mutant(
            "flight-not-unregistered",
            f"{_RPC}.dispatcher",
            "        flight.end()\n        self.state.unregister(flight)",
            "        flight.end()",
        ),
        # Events
        Mutant(
            "any-announcement-believed",
            f"{_RPC}.network_state",
            " or not self.heads.is_plausible(number, now):\n            return\n        if number < health.head:",
            ":\n            return\n        if number < health.head:",
        ),
        Mutant("removed-logs-not-sent", f"{_FEED}.dispatch", "            self._publish_removal(queued.block)\n", ""),
        Mutant("gap-not-filled", f"{_CORE}.head_chain", "        return first.parent\n", "        return None\n"),
        Mutant("removed-oldest-first", f"{_CORE}.head_chain", "            removed.append(gone)", "            pass"),
    )
}


def kept_seeds() -> dict[str, int]:
    """The seeds that found planted bugs, by the names of these. A change of the program or of the simulation gives a seed
    another history, so such a seed may find its bug no longer."""
    found: dict[str, int] = json.loads(SEEDS.read_text("utf-8"))
    return found


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._mutant)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(mutated(self._mutant, self.get_data(self.path).decode()), self.path)


def mutated(mutant: Mutant, source: str) -> str:
    count = source.count(mutant.old)
    assert count == 1, f"{mutant.name}: its place occurs {count} times in {mutant.module}; adapt the mutant"
    return source.replace(mutant.old, mutant.new)


def plant(name: str) -> None:
    """Import the program with this bug from now on."""
    sys.meta_path.insert(0, _Finder(MUTANTS[name]))
