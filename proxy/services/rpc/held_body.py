"""Large results that cannot be passed on at once, and the memory that they take.

Results are streamed where possible. A result is held while it waits for the items before it in a batch, while it becomes a
WebSocket message, while its client reads slowly and the upstream connection is needed for others, and while it is received
or sent whole because several callers wait for it. Its bytes count in the worker's memory budget (`ReplyShare`).

A result in pieces is a `HeldBody`, between the upstream connection that sends it and the caller that takes it. The rules:

* It is *passing* if its pieces are sent on as they come.
* It is *holding* if its pieces are kept. A result of known length takes its room before it is read. Otherwise many half-read
  results could fill the budget, and none could be completed. One of unknown length takes room for each piece.
* It is *unread* if there is no room: it stays at its upstream until others were sent, in the order of the account's calls, or
  until it is its turn to be passed on. If others need the upstream connection meanwhile, it is given up. A result that is too
  large by itself, or whose request can send nothing before it is whole, is given up at once.
* It is *paused* if its client does not read. If others need the upstream connection, the rest is held, or given up.

`TRANSITIONS` has these rules as a table. An event that a state does not list is a bug, and raises an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal, final

from proxy.core import jsonrpc
from proxy.memory_budget import BudgetLine
from proxy.wire.upstream import Piece, UpstreamConnection

# A request or message that holds less is not counted: this is the usual case, and must cost nothing.
FREE_BYTES: Final = 1 << 20
# Held replies are written in slices, so that a client that does not read is noticed, and others have their turns in between.
SLICE_BYTES: Final = 65_536

NO_ROOM = jsonrpc.error(
    jsonrpc.LIMIT_EXCEEDED, "too many large results wait for this account: make fewer calls at a time"
)

BodyState = Literal["passing", "holding", "unread", "paused", "over"]
BodyEvent = Literal["hold", "lack_room", "get_room", "get_turn", "stall", "read", "evict", "end"]
TRANSITIONS: Final[dict[BodyState, dict[BodyEvent, BodyState]]] = {
    "passing": {
        "hold": "holding",
        "lack_room": "unread",
        "get_turn": "passing",
        "stall": "paused",
        "read": "passing",
        # The client reads at the moment, but so slowly that it has kept the connection from others.
        "evict": "holding",
        "end": "over",
    },
    "holding": {"get_turn": "passing", "stall": "holding", "read": "passing", "evict": "holding", "end": "over"},
    "unread": {"get_room": "holding", "get_turn": "passing", "end": "over"},
    "paused": {"stall": "paused", "read": "passing", "evict": "holding", "end": "over"},
    "over": {"end": "over"},
}


class ReplyShare:
    """The bytes that one request or message holds."""

    __slots__ = ("_account", "_counted", "_free", "_held", "_replies", "per_reply")

    def __init__(self, replies: BudgetLine, account: str, per_reply: int = 0, *, free: int = FREE_BYTES) -> None:
        """`per_reply` bounds the results of one batch together. Up to `free` bytes are not counted."""
        self._replies = replies
        self._account = account
        self._free = free
        self.per_reply = per_reply
        self._held = 0
        self._counted = 0

    def __repr__(self) -> str:
        return f"<ReplyShare {self._held} bytes>"

    @property
    def is_large(self) -> bool:
        return self._held > self._free

    def take(self, size: int) -> bool:
        """Whether this many more bytes may be held."""
        held = self._held + size
        if held > self._free:
            if not self._replies.take(self._account, held - self._counted):
                return False
            self._counted = held
        self._held = held
        return True

    def take_anyway(self, size: int) -> None:
        """Count the beginning of a result that waits for room, even beyond the bounds: it has arrived already."""
        self._held += size
        if self._held > self._free:
            self._replies.take_anyway(self._account, self._held - self._counted)
            self._counted = self._held

    def reserve(self, size: int) -> bool:
        """Like `take`, but behind the account's results that wait for room."""
        return (size <= self._free or not self._replies.budget.is_awaited(self._account)) and self.take(size)

    def may_wait(self, size: int) -> bool:
        return self._replies.may_wait(size)

    def wait(self, take: Callable[[], bool]) -> None:
        self._replies.budget.wait(self._account, take)

    def forget(self, take: Callable[[], bool]) -> None:
        self._replies.budget.forget(self._account, take)

    def give(self, size: int) -> None:
        """Release memory. `size` may be a little more than was taken, because a reply is longer than its result."""
        size = min(size, self._held)
        self._held -= size
        if counted := min(size, self._counted):
            self._counted -= counted
            self._replies.give_back(self._account, counted)

    def give_all(self) -> None:
        """Release everything. Calling it again does nothing."""
        self.give(self._held)


@final
class HeldBody:
    """A large result in pieces. `parts` are those that are kept: without the start of the upstream's reply, but with the brace
    at its end."""

    __slots__ = ("_give_up", "_reserved", "parts", "share", "source", "state")

    def __init__(self, share: ReplyShare, source: UpstreamConnection, give_up: Callable[[], None]) -> None:
        """`source` sends the pieces. `give_up` is called if others need it and there is no room for the rest."""
        self.share = share
        self.source: UpstreamConnection | None = source
        self._give_up = give_up
        self.state: BodyState = "passing"
        self.parts: deque[Piece] = deque()
        # The bytes that are still to come and have their room.
        self._reserved = 0

    def __repr__(self) -> str:
        return f"<HeldBody {self.state}, {self.size} bytes>"

    def _on(self, event: BodyEvent) -> None:
        self.state = TRANSITIONS[self.state][event]

    @property
    def size(self) -> int:
        """The bytes that are kept."""
        return sum(map(len, self.parts))

    def hold(self, size: int | None, *, may_wait: bool) -> bool:
        """Keep the result, of this size if it is known. False if there is no room for it and it may not wait for room."""
        if size is None or self.share.reserve(size):
            self._reserved = size or 0
            self._on("hold")
            return True
        if not may_wait or self.source is None:
            return False
        self._on("lack_room")
        self.source.when_stalled(self._give_up)
        self.source.pause()
        self.share.wait(self._take_room)
        return True

    def _take_room(self) -> bool:
        """Others have given back their room. Returns whether there is enough."""
        size = self.source.bytes_left if self.source is not None else 0
        if not self.share.take(size):
            return False
        self._reserved = size
        self._on("get_room")
        self._read_on()
        return True

    def _read_on(self) -> None:
        if self.source is not None:
            self.source.when_stalled(None)
            self.source.resume()

    def has_room(self, size: int) -> bool:
        """Take room for a piece that has arrived."""
        if self.state == "unread":
            self.share.take_anyway(size)
            return True
        return self.share.take(size - self._use(size))

    def add(self, piece: Piece) -> bool:
        """Keep a piece. False if there is no room for it."""
        if not self.has_room(len(piece)):
            return False
        self.parts.append(bytes(piece))
        return True

    def passed_on(self, size: int) -> None:
        """A piece was sent on as it came, and does not need its room."""
        self.share.give(self._use(size))

    def _use(self, size: int) -> int:
        """The part of a piece that has its room already."""
        reserved = min(size, self._reserved)
        self._reserved -= reserved
        return reserved

    def turn_came(self) -> None:
        """The result can be passed on. Pieces that are kept, and the room for those that may have to be, stay."""
        was_unread = self.state == "unread"
        self._on("get_turn")
        if was_unread:
            self.share.forget(self._take_room)
            self._read_on()

    # A client that does not read

    def client_stalled(self) -> None:
        self._on("stall")
        if self.state == "paused" and self.source is not None:
            self.source.when_stalled(self.on_evicted)
            self.source.pause()

    def client_reads(self) -> None:
        """The client has read most of what was kept: give the memory back."""
        self._on("read")
        self._reserved = 0
        self.share.give_all()
        if self.source is not None:
            self.source.resume()

    def on_evicted(self) -> None:
        """Others need the connection: keep the rest of the result."""
        source = self.source
        if source is None:
            return
        if self.state != "holding":
            left = source.bytes_left
            if not self.share.take(left):
                self._give_up()
                return
            self._reserved = left
        self._on("evict")
        source.resume()

    # The end

    def end(self) -> None:
        """The result is complete, not wanted any more, or its connection is lost."""
        if self.state == "unread":
            self.share.forget(self._take_room)
            self._read_on()
        self._on("end")
        self.source = None

    def drop(self) -> None:
        """The result is not wanted."""
        self.end()
        self.share.give(self.size + self._reserved)
        self._reserved = 0
        self.parts.clear()


def slices(reply: Piece) -> list[Piece]:
    if len(reply) <= SLICE_BYTES:
        return [reply]
    view = memoryview(reply)
    return [view[at : at + SLICE_BYTES] for at in range(0, len(reply), SLICE_BYTES)]
