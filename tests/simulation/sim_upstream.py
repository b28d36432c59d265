"""A simulated upstream: a node that answers from its view of the chain, and fails in the ways that nodes fail.

*Habits* are faults of single calls, as probabilities. *Spells* are faults of the whole host for a while:
it is down, silent, stuck, behind, paused, or on a branch of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
import sha3

from tests.simulation.block_tree import DEEPEST_REORG, Block, BlockTree, answer_of, balance_of
from tests.simulation.history import History
from tests.simulation.memory_network import CALM, Address, MemoryNetwork, MemoryTransport, Weather
from tests.simulation.sim_streams import OVERLOADED, PROMPT_S, STREAM_PORT, StreamConnection, foreign_to

CHAIN_ID = 31337
# A pruned upstream has the state of this many blocks.
KEPT_STATES = 64
# An upstream without a fault for this long is reliable: the service uses it again after a failure, or a call that hung.
RELIABLE_AFTER_S = 12.0
# An upstream that has had no spell for this long is heard when heads are compared.
VOTES_AFTER_S = 4.0
# A liar adds a number from here on to balances, each liar its own. No balance is that large.
LIE = 1 << 200
# Balances of another chain. An upstream that names another chain gets no calls, so no client ever sees one.
OTHER_CHAIN = 1 << 240
# Lies of upstreams on trial. No other lie is that large.
TRIAL_LIE = 1 << 232
# A node that reports a head of another world adds this, once the service knows the head: at the start, it has nothing to
# compare two reports with.
HEAD_LIE = 1_000_000
HEAD_LIES_FROM_S = 4.0
# It lies for this long, then it reports its true head for as long, and so on: several nodes may share one address.
HEAD_LIES_FOR_S = 0.8
# After a pause, each call takes up to this long: the calls that have waited, and those that arrive meanwhile.
CATCHES_UP_S = 1.0
# On a branch of its own, a node now and then reads state for so long that the network has left the block behind for good. Its
# heads still come at once, so that it is found on another branch meanwhile, and it stays there until it has answered.
FORKED_LATE, FORKED_LATE_S = 0.5, (3.0, 9.0)
WRITES = ("eth_sendRawTransaction", "eth_sendPrivateTransaction")

NO_METHOD = {"code": -32601, "message": "the method does not exist/is not available"}
NO_RESULT = {"code": -32000, "message": "missing trie node: state is not available"}
NO_BLOCK = {"code": -32000, "message": "header not found"}


@dataclass(frozen=True, slots=True)
class Habits:
    """Faults of single calls, as probabilities."""

    takes_s: tuple[float, float] = (0.001, 0.02)
    # A call is answered from the state at its arrival; otherwise from the state at its reply. Nodes do both.
    early: float = 0.5
    late: float = 0.0
    late_s: tuple[float, float] = (0.2, 12.0)
    hang: float = 0.0
    http_500: float = 0.0
    http_429: float = 0.0
    overloaded: float = 0.0
    twice: float = 0.0
    foreign: float = 0.0
    garbage: float = 0.0
    hang_up: float = 0.0
    cut_off: float = 0.0
    # A write is executed, and the reply is lost.
    reply_lost: float = 0.0
    lie: float = 0.0
    # Faults of its stream, when it announces a head.
    stream_mute: float = 0.0
    stream_repeats: float = 0.0
    stream_closed: float = 0.0


STEADY = Habits()
# The faults that replace a reply, in the order in which they are drawn.
REPLY_FAULTS = (
    "hang_up", "cut_off", "hang", "http_500", "http_429", "overloaded", "twice", "foreign", "garbage", "reply_lost",
)  # fmt: skip
STREAM_FAULTS = ("stream_closed", "stream_mute", "stream_repeats")
SPELLS = ("down", "silent", "stuck", "behind", "paused", "fork")


@dataclass(frozen=True, slots=True)
class Nature:
    """Properties of an upstream that never change."""

    wrong_chain: bool = False
    pruned: bool = False
    chunked: bool = False
    head_liar: bool = False
    # It only gets copies of reads, of which every balance is a lie.
    on_trial: bool = False
    lies_for_s: float = HEAD_LIES_FOR_S
    # It has a block this long after the network.
    sees_after_s: float = 0.0
    # It also listens for WebSockets, on which it announces its heads.
    streams: bool = False


class Asked(NamedTuple):
    """A call or a batch that has arrived, and when. `seen`: the head at that time, if it is answered from there."""

    body: Any
    at_s: float
    seen: Block | None


# The first id of `services/rpc/flights.py`. Those of the short path are lower: they are few, and used again.
FIRST_KEPT_ID = 1000


class SimUpstream:
    """One upstream host."""

    def __init__(
        self,
        name: str,
        address: Address,
        tree: BlockTree,
        network: MemoryNetwork,
        rng: random.Random,
        *,
        nature: Nature = Nature(),  # noqa: B008 - frozen
        habits: Habits = STEADY,
        weather: Weather = Weather(),  # noqa: B008 - frozen
        spells: Sequence[str] = (),
    ) -> None:
        self.name, self.address, self.tree, self.nature = name, address, tree, nature
        self._network, self._rng = network, rng
        self.history: History = network.history
        self._habits, self._spells = habits, tuple(spells)
        self._weather = weather
        self._connections: dict[_Connection | StreamConnection, None] = {}
        self._subscriptions = 0
        self._filters: dict[str, int] = {}
        self._filter_count = 0
        # Its view of the chain: how far it is behind, the block it is stuck at, and the tip of its own branch.
        self._lag_s = nature.sees_after_s
        self._stuck: Block | None = None
        # Until when it was stuck last, and where.
        self._was_stuck: tuple[float, Block | None] = (-1e9, None)
        self._own: Block | None = None
        self._own_salt = 0
        self._is_forking, self._forks_until_s = False, 0.0
        self._is_silent = self._is_healed = False
        self._is_paused, self._busy_until_s = False, 0.0
        self._spell = ""
        self._well_since_s = -VOTES_AFTER_S
        self._failed_s = -1e9
        # The connections on which it has named its chain, by the host that asked and the port that was asked.
        self._named: dict[tuple[str, int], list[MemoryTransport]] = {}
        # Calls by method, and how often each write was executed.
        self.calls: Counter[str] = Counter()
        # How often it got each call, by the id that a call keeps in all attempts.
        self.attempts: Counter[int] = Counter()
        self.executed: Counter[str] = Counter()
        # The newest block that it has reported to each host, and when.
        self._reported: dict[str, list[tuple[float, int]]] = {}
        # When it was on a branch of its own, in seconds of the history.
        self.forked_at: list[tuple[float, float]] = []

    def __repr__(self) -> str:
        return f"<SimUpstream {self.name} at {self.head!r}>"

    def open(self) -> None:
        self._network.set_weather(self.address, self._weather)
        self._network.listen(lambda: _Connection(self), self.address)
        if self.nature.streams:
            self._network.set_weather(self.stream_address, self._weather)
            self._network.listen(lambda: StreamConnection(self), self.stream_address)

    @property
    def stream_address(self) -> Address:
        return self.address[0], STREAM_PORT

    @property
    def now_s(self) -> float:
        return self.history.now_s

    @property
    def head(self) -> Block:
        seen = self._stuck or self.tree.tip_at(self.now_s - self._lag_s)
        if self._own is not None and (self._is_forking or self._own.number >= seen.number):
            return self._own  # It joins the network when that has the longer branch: a node never goes back.
        return seen

    def head_before(self, seconds: float) -> Block:
        """Its head at that time, if it was as far behind as now."""
        if self._own is not None:
            return self.head
        until_s, block = self._was_stuck
        stuck = block if self.now_s - seconds < until_s else self._stuck
        return stuck or self.tree.tip_at(self.now_s - seconds - self._lag_s)

    @property
    def is_reliable(self) -> bool:
        """Whether it has answered every call lately, truthfully and from the network's newest block."""
        nature = self.nature
        if nature.wrong_chain or nature.head_liar or nature.sees_after_s or self._habits.lie or self._spell:
            return False
        if self._network.has_cuts(self.address[0]):
            return False
        last_s = max(self._failed_s, self._network.last_fault_s(self.address))
        return self.now_s - last_s > RELIABLE_AFTER_S

    def has_reported(self, number: int, host: str, moment_s: float) -> bool:
        """Whether it had told this host before this moment that it has the block with this number."""
        return any(at_s < moment_s and found >= number for at_s, found in reversed(self._reported.get(host, ())))

    def reports(self, number: int, host: str) -> None:
        found = self._reported.setdefault(host, [])
        if not found or number > found[-1][1]:
            found.append((self.now_s, number))

    def voted_at(self, moment_s: float) -> bool:
        """Whether it has reported the network's heads for some time before this moment, apart from faults of single calls."""
        if self.nature.wrong_chain or self.nature.head_liar or self._spell or self._network.has_cuts(self.address[0]):
            return False
        return moment_s - self._well_since_s > VOTES_AFTER_S

    @property
    def has_failed_lately(self) -> bool:
        """Whether a call on any of its ports may have failed."""
        ports = (self.address, self.stream_address)
        last_s = max(self._failed_s, *[self._network.last_fault_s(port) for port in ports])
        is_cut = self._network.has_cuts(self.address[0])
        return bool(self._spell) or is_cut or self.now_s - last_s <= RELIABLE_AFTER_S

    def failed(self, kind: str, detail: str) -> None:
        self._failed_s = self.now_s
        self.history.fault(self.name, kind, detail)

    # Spells

    async def live(self) -> None:
        """Go through spells, with good times between them."""
        rng = self._rng
        while self._spells:
            await asyncio.sleep(rng.expovariate(1 / 6.0))
            spell, lasts_s = rng.choice(self._spells), min(12.0, 0.3 + rng.expovariate(1 / 3.0))
            self._spell = spell
            self.failed(f"upstream {spell}", f"for {lasts_s:.2f} s")
            await self._go_through(spell, lasts_s)
            self._spell, self._failed_s = "", self.now_s
            self._well_since_s = self.now_s
            self.history.note(self.name, f"upstream no longer {spell}")

    async def _go_through(self, spell: str, lasts_s: float) -> None:
        if spell == "down":
            self._network.stop_listening(self.address)
            self._network.stop_listening(self.stream_address)
            for connection in tuple(self._connections):
                connection.drop()
            await asyncio.sleep(lasts_s)
            self.open()
        elif spell == "silent":
            self._is_silent = True
            await asyncio.sleep(lasts_s)
            self._is_silent = False
        elif spell == "stuck":
            self._stuck = self.head
            await asyncio.sleep(lasts_s)
            self._was_stuck, self._stuck = (self.now_s, self._stuck), None
        elif spell == "behind":
            # A view that jumped back would be a reorganisation: the lag grows while the head stands still.
            self._stuck = self.head
            await asyncio.sleep(lasts_s / 2)
            self._lag_s, self._stuck = self.nature.sees_after_s + lasts_s / 2, None
            await asyncio.sleep(lasts_s)
            self._lag_s = self.nature.sees_after_s
        elif spell == "paused":
            self._is_paused = True
            await asyncio.sleep(lasts_s)
            self._wake()
        elif spell == "fork":
            await self._fork(lasts_s)

    def _wake(self) -> None:
        """The process goes on, as after a long garbage collection: it answers the calls that have waited, slowly at first."""
        self._is_paused, self._busy_until_s = False, self.now_s + CATCHES_UP_S
        for connection in tuple(self._connections):
            connection.answer_held()

    async def _fork(self, lasts_s: float) -> None:
        began, self._forks_until_s = self.now_s, self.now_s + lasts_s
        self._own, self._is_forking = self.head, True
        while self.now_s < self._forks_until_s:
            # No fork replaces a final block, and while no other upstream answers this branch is the network's.
            third = self._own.at(self._own.number - DEEPEST_REORG + 1)
            if third is None or not third.private_to:
                self._own_salt += 1
                self._own = self.tree.add(self._own, self.now_s, salt=self._own_salt, private_to=self.name)
            await asyncio.sleep(1.0)
        self._is_forking = False
        self.forked_at.append((began, self.now_s))

    def heal(self) -> None:
        """Everything is well from now on. Connections that froze stay frozen."""
        self._habits, self._weather, self._spells = STEADY, CALM, ()
        self._is_healed = True
        self._lag_s, self._stuck, self._is_forking, self._is_silent = self.nature.sees_after_s, None, False, False
        if self._spell:
            self._spell, self._well_since_s = "", self.now_s
        if self._is_paused:
            self._wake()
        self.open()

    # Calls

    def joined(self, connection: _Connection | StreamConnection) -> None:
        self._connections[connection] = None

    def left(self, connection: _Connection | StreamConnection) -> None:
        self._connections.pop(connection, None)

    @property
    def rng(self) -> random.Random:
        return self._rng

    @property
    def is_silent(self) -> bool:
        return self._is_silent

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def takes_s(self, asked: Any) -> float:
        """How long it takes for a call or a batch."""
        rng, habits = self._rng, self._habits
        reads_state = isinstance(asked, dict) and asked["method"] == "eth_getBalance"
        if self._is_forking and reads_state and rng.random() < FORKED_LATE:
            self.failed("fork late", "")
            late_s = rng.uniform(*FORKED_LATE_S)
            self._forks_until_s = max(self._forks_until_s, self.now_s + late_s + 0.1)
            return late_s
        if self.now_s < self._busy_until_s:
            return rng.uniform(0.0, CATCHES_UP_S)
        if habits.late and rng.random() < habits.late:
            self.failed("upstream late", "")
            return rng.uniform(*habits.late_s)
        return rng.uniform(*habits.takes_s)

    def draw_fault(self) -> str:
        """The fault of the next reply; empty if it is good."""
        return self._drawn(REPLY_FAULTS)

    def draw_stream_fault(self) -> str:
        """The fault of the next announcement; empty if it is good. A stream is not needed: polls find heads, too."""
        fault = self._drawn(STREAM_FAULTS).replace("_", " ")
        if fault:
            self.history.fault(self.name, fault)
        return fault

    def _drawn(self, faults: Sequence[str]) -> str:
        draw = self._rng.random()
        for fault in faults:
            draw -= getattr(self._habits, fault)
            if draw < 0:
                return fault
        return ""

    def next_subscription(self) -> int:
        self._subscriptions += 1
        return self._subscriptions

    def arrived(self, body: Any) -> Asked:
        """A call or a batch has arrived."""
        return Asked(body, self.now_s, self.head if self._rng.random() < self._habits.early else None)

    def answer(self, call: dict[str, Any], transport: MemoryTransport, seen: Block | None) -> dict[str, Any]:
        """The reply to a call that came on this connection. `seen`: the head when it arrived, if it is answered from there."""
        method, params = call["method"], call["params"]
        self.calls[method] += 1
        if isinstance(call["id"], int) and call["id"] >= FIRST_KEPT_ID:
            self.attempts[call["id"]] += 1
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": call["id"]}
        try:
            if method == "eth_chainId" and self._refuses_chain(transport):
                raise _Refused(NO_METHOD)
            head = seen or self.head
            reply["result"] = self._result(method, params, head)
            if method == "eth_blockNumber" or (method == "eth_getBlockByNumber" and params[0] == "latest"):
                self.reports(head.number, transport.asker[0])
        except _Refused as exc:
            reply["error"] = exc.error
        return reply

    def named_chain(self, transport: MemoryTransport) -> None:
        """A good reply that names the chain is on its way."""
        if self.nature.wrong_chain:
            self._named.setdefault(transport.asker, []).append(transport)

    def _refuses_chain(self, transport: MemoryTransport) -> bool:
        """Once the asker has read from this port that it is of another chain, it may refuse to name one: that takes nothing
        back."""
        was_read = any(each.is_read for each in self._named.get(transport.asker, ()))
        return was_read and self._rng.random() < 0.2

    def _result(self, method: str, params: list[Any], head: Block) -> Any:
        if method == "eth_chainId":
            return hex(CHAIN_ID + self.nature.wrong_chain)
        if method == "eth_blockNumber":
            return hex(head.number + self._head_lie)
        if method == "eth_getBalance":
            block = self._state_at(params[1], head)
            lies = self._habits.lie and self._rng.random() < self._habits.lie
            if lies:
                self.history.fault(self.name, "lie", params[0][-8:])
            own_lie = LIE << int(self.name.rpartition(" ")[2]) if lies else TRIAL_LIE if self.nature.on_trial else 0
            return hex(balance_of(params[0], block) + own_lie + (OTHER_CHAIN if self.nature.wrong_chain else 0))
        if method == "eth_call":
            self._state_at(params[1], head)
            return answer_of(params[0]["data"])
        if method == "eth_getBlockByNumber":
            found = self._block_at(params[0], head)
            return None if found is None else self._shown(found, params[0], head)
        if method == "eth_getBlockByHash":
            by_hash = self.tree.find(params[0])
            is_known = by_hash is not None and (by_hash.is_on(head) or not by_hash.private_to)
            return by_hash.json() if by_hash is not None and is_known and by_hash.number <= head.number else None
        if method == "eth_getLogs":
            return self._logs(params[0], head)
        if method in WRITES:
            return self._execute(params[0] if isinstance(params[0], str) else params[0]["tx"])
        if method == "eth_newBlockFilter":
            self._filter_count += 1
            name = f"0x{self._filter_count:x}"
            self._filters[name] = head.number
            return name
        if method == "eth_getFilterChanges":
            return self._changes(params[0], head)
        if method == "eth_uninstallFilter":
            return self._filters.pop(params[0], None) is not None
        if method == "eth_syncing":
            return False
        raise _Refused(NO_METHOD)

    def shown_head(self, block: Block) -> dict[str, Any]:
        """A block as it is announced."""
        lie = self._head_lie
        return {**block.json(), "number": hex(block.number + lie)} if lie else block.json()

    def _shown(self, block: Block, asked: str, head: Block) -> dict[str, Any]:
        """A node with an impossible head answers with it at `latest`. Asked by number, it has the block that was asked for."""
        return self.shown_head(block) if block is head and asked in ("latest", "pending") else block.json()

    @property
    def _head_lie(self) -> int:
        if not self.nature.head_liar or self.now_s < HEAD_LIES_FROM_S:
            return 0
        # A host that takes turns has each block first: while it lies, nothing else has the newest block. So this ends with the
        # other faults.
        if self._is_healed and self.nature.lies_for_s < HEAD_LIES_FOR_S:
            return 0
        return 0 if int((self.now_s - HEAD_LIES_FROM_S) / self.nature.lies_for_s) % 2 else HEAD_LIE

    def _block_at(self, tag: str, head: Block) -> Block | None:
        match tag:
            case "latest" | "pending":
                return head
            case "safe" | "finalized":
                return head.at(head.number - 4)
            case "earliest":
                return head.at(0)
            case _:
                return head.at(int(tag, 16))

    def _state_at(self, tag: str, head: Block) -> Block:
        block = self._block_at(tag, head)
        if block is None:
            raise _Refused(NO_BLOCK)
        if self.nature.pruned and block.number < head.number - KEPT_STATES:
            self.history.covers("state pruned")
            raise _Refused(NO_RESULT)
        return block

    def _logs(self, wanted: dict[str, Any], head: Block) -> list[dict[str, Any]]:
        if "blockHash" in wanted:
            one = self.tree.find(wanted["blockHash"])
            if one is None or not one.is_on(head):
                raise _Refused({"code": -32000, "message": "unknown block"})
            blocks = [one]
        else:
            first = self._block_at(wanted.get("fromBlock", "latest"), head)
            block: Block | None = self._block_at(wanted.get("toBlock", "latest"), head) or head
            blocks = []
            while first is not None and block is not None and block.number >= first.number:
                blocks.append(block)
                block = block.parent
        return [log for each in reversed(blocks) for log in each.logs() if matches(wanted, log)]

    def _execute(self, raw: str) -> str:
        name = f"0x{sha3.keccak_256(bytes.fromhex(raw[2:])).hexdigest()}"
        self.executed[raw] += 1
        if name in self.tree.accepted:
            raise _Refused({"code": -32000, "message": "already known"})
        self.tree.accepted[name] = self.tree.pool[name] = None
        self.history.note(self.name, f"executed {name[:10]}")
        return name

    def _changes(self, name: str, head: Block) -> list[str]:
        if name not in self._filters:
            raise _Refused({"code": -32000, "message": "filter not found"})
        blocks, block, since = [], head, self._filters[name]
        while block.parent is not None and block.number > since:
            blocks.append(block.hash)
            block = block.parent
        self._filters[name] = max(head.number, since)
        return blocks[::-1]


def matches(wanted: dict[str, Any], log: dict[str, Any]) -> bool:
    addresses, topics = wanted.get("address") or (), wanted.get("topics") or ()
    if isinstance(addresses, str):
        addresses = (addresses,)
    return (not addresses or log["address"] in addresses) and (not topics or log["topics"][0] == topics[0])


class _Refused(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.error = error


class _Connection(asyncio.Protocol):
    """One connection of an upstream. Replies come in the order of the calls."""

    _transport: MemoryTransport

    def __init__(self, upstream: SimUpstream) -> None:
        self._upstream = upstream
        self._buffer = b""
        self._free_at = 0.0
        self._held: list[Asked] = []
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._upstream.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.left(self)

    def drop(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            if len(self._buffer) < end + 4 + size:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + size], self._buffer[end + 4 + size :]
            self._answer_later(self._upstream.arrived(orjson.loads(body)))

    def _answer_later(self, asked: Asked) -> None:
        self._free_at = max(self._free_at + 1e-6, self._loop.time() + self._upstream.takes_s(asked.body))
        self._loop.call_at(self._free_at, self._answer, asked)

    def answer_held(self) -> None:
        """Answer the calls that have waited for the end of a pause."""
        held, self._held = self._held, []
        for asked in held:
            self._answer_later(asked)

    def _answer(self, asked: Asked) -> None:
        upstream, body = self._upstream, asked.body
        if self._transport.is_closing() or upstream.is_silent:
            return
        if upstream.is_paused:
            self._held.append(asked)
            return
        methods = ",".join(call["method"] for call in body) if isinstance(body, list) else body["method"]
        fault = upstream.draw_fault()
        if fault:
            upstream.failed(f"reply {fault}", methods)
        if fault in ("hang", "hang_up", "http_500", "http_429", "overloaded"):
            self._fail(fault, body)
            return
        calls = body if isinstance(body, list) else [body]
        replies = [upstream.answer(call, self._transport, asked.seen) for call in calls]
        reply = replies if isinstance(body, list) else replies[0]
        if not fault and methods == "eth_chainId" and upstream.now_s - asked.at_s < PROMPT_S:
            upstream.named_chain(self._transport)
        upstream.history.note(upstream.name, f"answers {methods}")
        if fault == "reply_lost":
            self._transport.close()
            return
        data = self._framed(b"200 OK", orjson.dumps(foreign_to(reply) if fault == "foreign" else reply))
        if fault == "garbage":
            data = self._framed(b"200 OK", b'{"jsonrpc":"2.0","id":1,"resu')
        if fault == "cut_off":
            self._transport.write(data[: upstream.rng.randint(1, len(data) - 1)])
            self._transport.close()
        else:
            self._transport.write(data * 2 if fault == "twice" else data)

    def _fail(self, fault: str, asked: Any) -> None:
        """A failure before the call was executed."""
        if fault == "hang_up":
            self._transport.close()
        elif fault == "http_500":
            self._transport.write(self._framed(b"500 Internal Server Error", b'{"message":"no"}'))
        elif fault == "http_429":
            self._transport.write(self._framed(b"429 Too Many Requests", b"slow down", b"Retry-After: 1\r\n"))
        elif fault == "overloaded":
            calls = asked if isinstance(asked, list) else [asked]
            replies = [{"jsonrpc": "2.0", "id": call["id"], "error": OVERLOADED} for call in calls]
            body = orjson.dumps(replies if isinstance(asked, list) else replies[0])
            self._transport.write(self._framed(b"200 OK", body))

    def _framed(self, status: bytes, body: bytes, more: bytes = b"") -> bytes:
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n%b" % (status, more)
        if self._upstream.nature.chunked and body:
            return b"%bTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, len(body), body)
        return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
