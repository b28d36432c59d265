"""Knows the truth, and checks every reply and every event against what the documentation promises.

A rule that a history breaks is a bug of the program or a wrong promise in the documentation: a rule is never weakened to let a
seed pass. Each rule has a name, which a failing seed reports:

| rule | promise |
|---|---|
| `one-reply` | every call gets exactly one reply, with its own id |
| `possible` | no result that no block of the network's history gives |
| `branch` | an upstream that is on another branch than most gets no calls: some seconds after it left, no result of its branch,
  while most upstreams report the network's heads; and no result of any replaced block when all faults have ended |
| `backwards` | once a reply has named a block to a key, no later call of that key at `latest` through the same gateway is
  answered from before it, while an upstream that has reported the block to this gateway answers reliably; while nothing
  fails, also through any other gateway, as soon as the message about the block has had time to arrive |
| `named` | the state behind a reply has reached the block in its `X-Block-Number` |
| `min-block` | with `X-Min-Block`, no result from before that block |
| `once` | a write is executed at most once |
| `repeats` | one call is sent to upstreams a few times at most |
| `verified` | with `X-Verify`, no lie |
| `trial` | no result, and no write, of an upstream that is on trial (`shadow`) |
| `limit` | never more than an account's buckets hold, over all gateways together; a gateway without Valkey adds its share |
| `refusal` | no refusal while the bucket had room; in a fleet, while hardly any of it was used |
| `share` | an account with one call under way is served before accounts with several: it waits for one call of theirs at most,
  or until readers that do not read lose their connections, and is not refused because the others have too many (while nothing
  fails: faults take their own time) |
| `charge` | the price of a reply is the list price, and usage is the sum of what was served |
| `deadline` | every call ends in time |
| `stranger` | nothing of one account in the replies of another |
| `error` | no error of ours while nothing fails; a 500 only if an upstream failed the call; that an upstream does not have a
  block only if one of them has not got it yet; no error because of an impossible block if all others answer reliably |
| `events` | subscriptions without gap, double or inversion, with `removed` after reorganisations |
| `leftover` | memory, connections and calls in flight return to zero |
| `recovers` | when all faults have ended, calls succeed again |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.simulation.block_tree import Balance, Block, BlockTree, answer_of, owner_of
from tests.simulation.history import History
from tests.simulation.outcome import Violation
from tests.simulation.sim_upstream import HEAD_LIE, LIE, NO_BLOCK, OTHER_CHAIN, TRIAL_LIE, SimUpstream

PRICES = {
    "eth_chainId": 0,
    "eth_blockNumber": 1,
    "eth_getBalance": 2,
    "eth_call": 3,
    "eth_getBlockByNumber": 2,
    "eth_getLogs": 8,
    "eth_sendRawTransaction": 5,
    "eth_sendPrivateTransaction": 5,
    "eth_newBlockFilter": 2,
    "eth_getFilterChanges": 2,
    "eth_uninstallFilter": 0,
    "eth_subscribe": 1,
    "eth_unsubscribe": 0,
}
ARCHIVE_PRICE, ARCHIVE_AFTER = 20, 128
# The calls that a replay of a subscription makes.
REPLAY_METHODS = ("eth_getLogs", "eth_getBlockByNumber", "eth_getBlockByHash")
# Statuses that a well-formed request may get while upstreams or the network fail.
FAILURES = (503, 504)
# A 500 is a fault of the program, unless it says that an upstream failed the call.
BLAMES_UPSTREAM = "the call failed on "
# Codes of errors inside replies, likewise: of the chain, a limit, ours.
FAILURE_CODES = (-32000, -32002, -32005, -32603)
# The worker's own timeout for calls, in the simulated settings.
CALL_TIMEOUT_S = 10.0
# No call takes longer, with everything that may delay it: a slow reader waits for the longest.
LONGEST_CALL_S = 120.0
# Beyond its deadline, a reply may take this long: the sweep's interval, and the way there and back.
CALM_SLACK_S = 0.3
# The same if segments stall, which they may several times on the way.
STALLED_SLACK_S = 8.0
# The same for a deadline that the client chose, if nothing fails: it has a timer of its own, so only the way counts.
OWN_SLACK_S = 0.05
# The mark of calls whose replies are hardly read: their connections may be closed.
HARDLY = "hardly"
# Events that may be on their way to one subscription.
EVENTS_ON_THE_WAY = 20
# An upstream that was alone on its branch gets calls again after this time: heads are polled every second.
FORK_NOTICED_S = 2.0
# A report has arrived after this time, if nothing fails.
REPORTED_S = 0.05
# The words of the error if an upstream reported a block that cannot be.
IMPOSSIBLE = "impossible block"
# A message from one gateway to the others has arrived after this time, if nothing fails.
TOLD_S = 0.1
# The largest share of a limit that a gateway uses while Valkey is away (`KEPT_SHARE`), and for how long it keeps what it has
# not used (`AWAY_HOLDS_S`): docs/internals/fleet.md.
AWAY_SHARE, AWAY_HOLDS_S = 0.95, 1.25
# When Valkey forgets what it has lent, the bucket is full again: one second's worth more. It was lent in the second before.
FORGOTTEN_S = 1.0
# The parts of a call that may be needed for a share: its way, the turns of the loop, and connections that are opened.
SHARE_SLACK_S = 0.1
# Readers that hold all connections have lost one after this time.
HOARDED_S = 1.0
# How often a call is sent to upstreams at most: three times, and once more for each of seven ports that comes back.
MOST_SENT = 10
# The words of the errors if no upstream has the block, and if the queues of all upstreams are full.
BLOCKLESS = "no upstream has "
OVERLOADED = "overloaded"
# Leases of other gateways have ended after this time, and this part of a limit is never lent out in advance.
LEASES_END_S, SELDOM_REFUSED = 2.0, 0.25
# An upstream on a branch of its own has been found after this time: some polls, and the comparisons after them.
FORK_FOUND_S = 6.0
# Fresh state in calm weather: the head is polled every second, and the poll takes a while.
CALM_AGE_BLOCKS = 3


# All keys and all marks of accounts begin with these: large replies are searched for them only.
KEY_PREFIX, MARK_PREFIX = b"svc_live_", b"acc000"


class SeenBlocks:
    """The newest block that replies to a key have named, for each network and gateway, and since when."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[tuple[float, int]]] = {}

    def __repr__(self) -> str:
        return f"<SeenBlocks {self._found}>"

    def note(self, network: str, via: str, number: int, now_s: float) -> None:
        found = self._found.setdefault((network, via), [(now_s, 0)])
        if number > found[-1][1]:
            found.append((now_s, number))

    def newest(self, network: str, via: str, *, others_until_s: float) -> int:
        """The newest through this gateway so far, and through others until that time."""
        newest = 0
        for (each, gateway), found in self._found.items():
            if each == network:
                until_s = math.inf if gateway == via else others_until_s
                newest = max(newest, next((number for at_s, number in reversed(found) if at_s <= until_s), 0))
        return newest


@dataclass(eq=False, slots=True)
class Account:
    name: str
    # The text of its key, and a mark that only its own calls contain.
    key: str
    mark: str
    requests_per_second: int
    units_per_second: int
    calls: list[Call] = field(default_factory=list)
    under_way: dict[Call, None] = field(default_factory=dict)
    seen: SeenBlocks = field(default_factory=lambda: SeenBlocks())
    # Events of its subscriptions, which cost a unit each, and malformed requests, which may cost one.
    events: int = 0
    malformed: int = 0
    # The key and the mark as replies would contain them.
    key_bytes: bytes = field(init=False)
    mark_bytes: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.key_bytes, self.mark_bytes = self.key.encode(), self.mark.encode()
        assert self.key_bytes.startswith(KEY_PREFIX)
        assert self.mark_bytes.startswith(MARK_PREFIX)

    def __repr__(self) -> str:
        return f"<Account {self.name} {self.requests_per_second}/s>"


@dataclass(eq=False, slots=True)
class Call:
    account: Account
    tree: BlockTree
    id: Any
    method: str
    params: list[Any]
    directives: dict[str, str]
    sent_s: float
    # The newest block that the account had seen when it was sent, and the gateway that it was sent to.
    floor: int
    via: str = ""
    done_s: float | None = None
    # "result", "error", "refused" (a 429), "failed" (another status), or "lost" with its connection.
    outcome: str = ""
    units: int = 0
    in_batch: bool = False
    # The block in the reply's X-Block-Number; 0 if it names none.
    named: int = 0
    # The block that its result was read at, if the result says so.
    shows: Block | None = None
    # When its last byte was written, if that was later than the first.
    written_s: float = 0.0
    # Whether its account had no other call under way.
    is_alone: bool = True

    def __repr__(self) -> str:
        return f"<Call {self.id!r} {self.method} of {self.account.name}>"

    @property
    def names_latest(self) -> bool:
        return self.method == "eth_blockNumber" or "latest" in self.params

    @property
    def min_block(self) -> int:
        return int(self.directives.get("X-Min-Block", "0"))

    @property
    def is_verified(self) -> bool:
        return "X-Verify" in self.directives

    @property
    def is_paid_if_it_fails(self) -> bool:
        """Upstreams were asked: a block that is not reached, a deadline of the caller's own, and replies that differ are no
        fault of the service."""
        return bool(self.min_block) or "X-Timeout-Ms" in self.directives or self.is_verified

    def began(self) -> None:
        others = self.account.under_way
        for other in others:
            other.is_alone = False
        self.is_alone = not others
        others[self] = None

    def price(self) -> int:
        units = PRICES[self.method]
        is_state = self.method in ("eth_getBalance", "eth_call") and self.params[1].startswith("0x")
        if is_state and int(self.params[1], 16) <= self.tree.tip.number - ARCHIVE_AFTER:
            units = ARCHIVE_PRICE
        return units * 3 if self.is_verified else units


@dataclass(frozen=True, slots=True)
class Bounds:
    """The parts of a scenario that the rules depend on."""

    is_calm: bool = False
    # Whether segments stall.
    stalls: bool = False
    # How long upstreams take for a call at most.
    takes_s: float = 0.0
    # How many calls an upstream takes at a time, if accounts make more or do not read their results; else 0.
    places: int = 0
    # Whether accounts do not read their results.
    hoards: bool = False
    # How long the machine is busy with other work at most.
    pauses_s: float = 0.0

    @property
    def slack_s(self) -> float:
        """How long a reply may take beyond its deadline."""
        return STALLED_SLACK_S if self.stalls or self.pauses_s else CALM_SLACK_S

    @property
    def own_slack_s(self) -> float:
        """The same for a deadline that the client chose."""
        return OWN_SLACK_S if self.is_calm and not self.pauses_s else self.slack_s

    @property
    def share_s(self) -> float:
        """How long the only call of an account may take. The machine may be busy at each step of it."""
        return 2 * self.takes_s + SHARE_SLACK_S + self.hoards * HOARDED_S + 4 * self.pauses_s

    @property
    def told_s(self) -> float:
        """After this time, all gateways know what one knows, if nothing fails."""
        return TOLD_S + 4 * self.pauses_s if self.is_calm else math.inf


@dataclass(slots=True)
class Away:
    """A gateway was without Valkey."""

    gateway: str
    since_s: float
    until_s: float = math.inf


class Oracle:
    def __init__(self, history: History, bounds: Bounds) -> None:
        self._history = history
        self._is_calm, self._places = bounds.is_calm, bounds.places
        self._share_s, self._told_s = bounds.share_s, bounds.told_s
        self._slack_s, self._own_slack_s = bounds.slack_s, bounds.own_slack_s
        self.violations: list[Violation] = []
        self.accounts: list[Account] = []
        self.upstreams: list[SimUpstream] = []
        self.outcomes: Counter[str] = Counter()
        self.calls = 0
        # From this time on, nothing may fail.
        self._healed_s: float | None = None
        self.writes: dict[str, Call] = {}
        self._is_fleet = False
        # When gateways were without Valkey, and when Valkey has forgotten what it had lent.
        self._away: list[Away] = []
        self._forgotten_s: list[float] = []

    def __repr__(self) -> str:
        return f"<Oracle {self.calls} calls, {len(self.violations)} violations>"

    def violate(self, rule: str, text: str) -> None:
        self.violations.append(Violation(rule, self._history.now_s, text))
        self._history.note("oracle", f"{rule}: {text}")

    def malformed(self, account: Account, kind: str) -> None:
        """A client is about to send a malformed request."""
        account.malformed += 1
        self._history.covers(f"malformed {kind}")

    def vandal_replied(self, status: int, body: bytes) -> None:
        """The reply to a malformed request, or to one that is valid by chance."""
        self.outcomes[f"malformed {status}"] += 1
        if status >= 500 and status not in FAILURES:
            self.violate("error", f"a malformed request got a {status}: {body[:200]!r}")

    @property
    def now_s(self) -> float:
        return self._history.now_s

    @property
    def is_healed(self) -> bool:
        return self._healed_s is not None

    def handshake_refused(self, status: int, body: bytes) -> None:
        self.outcomes[f"handshake {status}"] += 1
        if status not in FAILURES or self._must_succeed:
            self.violate("error", f"a handshake got a {status}: {body[:200]!r}")

    def socket_closed(self, who: str, code: int) -> None:
        self.outcomes[f"closed {code}"] += 1
        if self._must_succeed or code not in (1008, 1012, 1013):
            self.violate("error", f"the socket of {who} was closed with {code}")

    def healed(self) -> None:
        self._healed_s = self._history.now_s

    def replaced_results(self, account: Account, tree: BlockTree) -> list[tuple[str, list[Any]]]:
        """The calls at the number of a block whose results are out of date, because the network has another block there."""
        found = {
            (call.method, orjson.dumps(call.params)): call
            for call in account.calls
            if call.tree is tree and call.shows is not None and not call.names_latest and not call.shows.is_on(tree.tip)
        }
        return [(call.method, call.params) for call in found.values()]

    # The fleet

    def fleet_began(self) -> None:
        """Several gateways share their limits from now on. They have not connected to Valkey yet."""
        self._is_fleet = True

    def valkey_changed(self, gateway: str, *, is_up: bool) -> None:
        """A gateway has noticed that Valkey answers, or that it does not."""
        now_s = self._history.now_s
        self._history.note(gateway, "valkey is up" if is_up else "valkey is away")
        for each in self._away:
            if each.gateway == gateway and each.until_s == math.inf:
                each.until_s = now_s
        if not is_up:
            self._away.append(Away(gateway, now_s))

    def tokens_forgotten(self) -> None:
        self._forgotten_s.append(self._history.now_s)

    def _excess(self, first_s: float, last_s: float) -> tuple[int, float]:
        """How often calls may be rounded up in this time, and the seconds of refill that may be served beyond the limit."""
        spells = [each for each in self._away if each.since_s <= last_s and each.until_s >= first_s]
        shares_s = sum(min(each.until_s, last_s) - max(each.since_s, first_s) + AWAY_HOLDS_S for each in spells)
        bursts = sum(first_s - FORGOTTEN_S <= at_s <= last_s for at_s in self._forgotten_s)
        return len(spells), AWAY_SHARE * shares_s + FORGOTTEN_S * bursts

    def asked(
        self,
        account: Account,
        tree: BlockTree,
        id_: Any,
        method: str,
        params: list[Any],
        directives: dict[str, str],
        *,
        via: str,
    ) -> Call:
        """A client is about to send a call."""
        now_s = self._history.now_s
        floor = account.seen.newest(tree.name, via, others_until_s=now_s - self._told_s)
        call = Call(account, tree, id_, method, params, directives, now_s, floor, via)
        account.calls.append(call)
        call.began()
        self.calls += 1
        if method.startswith("eth_send"):
            self.writes[params[0] if isinstance(params[0], str) else params[0]["tx"]] = call
        self._history.note(account.name, f"call {id_} {method} {orjson.dumps(params).decode()[:60]}")
        return call

    # Replies

    def lost(self, call: Call) -> None:
        """The connection ended before the reply."""
        self._end(call, "lost")
        if self._is_calm and call.directives.get("reads slowly") != HARDLY:
            self.violate("one-reply", f"{call!r} got no reply: its connection ended")

    def no_reply(self, call: Call) -> None:
        self._end(call, "lost")
        self.violate("one-reply", f"{call!r} got no reply in time")

    def left(self, call: Call) -> None:
        """The client left before the reply."""
        self._end(call, "left")

    def replied(self, call: Call, status: int, headers: dict[str, str], body: bytes) -> None:
        """The reply to a single call over HTTP."""
        self._check_strangers(call.account, body)
        if status == 200:
            call.named = int(headers.get("x-block-number", "0"))
            self._judge(call, _parsed(body), price=headers.get("x-compute-units"))
            return
        self._end(call, "refused" if status == 429 else "failed", str(status))
        error = (_parsed(body) or {}).get("error") or {}
        if error.get("status") != status or not error.get("message"):
            self.violate("error", f"{call!r} got a {status} with the body {body[:200]!r}")
        if status == 429:
            self._check_refusal(call)
        elif status == 503 and call.min_block and "x-block-number" in headers:
            self._check_missing_block(call, int(headers["x-block-number"]))
        elif status == 504 and "X-Timeout-Ms" in call.directives:
            self._check_early(call)
        elif (self._must_succeed and self._is_ours_to_avoid(call, error)) or not _is_failure(status, error):
            self.violate("error", f"{call!r} got a {status}: {error.get('message')}")
        if status == 500 and call.directives.get("X-Retry") == "1" and IMPOSSIBLE in str(error.get("message")):
            self._check_impossible(call)
        self._check_deadline(call)

    def replied_together(self, calls: Sequence[Call], status: int, body: bytes) -> None:
        """The reply to a batch."""
        self._check_strangers(calls[0].account, body)
        found = _parsed(body)
        if status != 200 or not isinstance(found, list):
            for call in calls:
                self._end(call, "refused" if status == 429 else "failed", str(status))
            if status not in (429, *FAILURES) or (status != 429 and self._must_succeed):
                self.violate("error", f"a batch of {len(calls)} calls got a {status}: {body[:200]!r}")
            return
        expected = [call for call in calls if call.id is not None]
        for call in calls:
            if call.id is None:
                self._end(call, "left")
        if [reply.get("id") for reply in found] != [call.id for call in expected]:
            self.violate(
                "one-reply", f"a batch of {[call.id for call in calls]} got {[each.get('id') for each in found]}"
            )
            return
        for call, reply in zip(expected, found, strict=True):
            call.in_batch = True
            self._judge(call, reply)

    def messaged(self, call: Call, reply: dict[str, Any]) -> None:
        """The reply to a call on a socket."""
        if call.outcome:
            self.violate("one-reply", f"{call!r} got a second reply: {reply}")
            return
        self._check_strangers(call.account, orjson.dumps(reply))
        self._judge(call, reply)

    @property
    def _must_succeed(self) -> bool:
        return self._is_calm or self._healed_s is not None

    def _end(self, call: Call, outcome: str, detail: str = "") -> None:
        call.outcome, call.done_s = outcome, self._history.now_s
        call.account.under_way.pop(call, None)
        self.outcomes[f"{outcome}{' ' if detail else ''}{detail}"] += 1
        self._history.note(call.account.name, f"end  {call.id} {outcome} {detail}")

    def _judge(self, call: Call, reply: Any, *, price: str | None = None) -> None:
        if not isinstance(reply, dict) or reply.get("id") != call.id or type(reply.get("id")) is not type(call.id):
            self._end(call, "error")
            self.violate("one-reply", f"{call!r} got the reply {str(reply)[:200]}")
            return
        if ("result" in reply) == ("error" in reply):
            self.violate("one-reply", f"{call!r} got both or neither of result and error: {str(reply)[:200]}")
        call.units = call.price()
        if "error" in reply:
            self._judge_error(call, reply["error"])
        else:
            self._end(call, "result")
            self._check_share(call)
            try:
                self._judge_result(call, reply["result"])
            except (AttributeError, KeyError, TypeError, ValueError):
                self.violate("possible", f"{call!r} got a result of another form: {str(reply['result'])[:200]}")
        if price is not None and call.is_verified and self._is_verified_by_more(call, int(price)):
            call.units = int(price)
        if price is not None and int(price) != call.units and not self._may_split(call):
            self.violate("charge", f"{call!r} cost {price} units, not {call.units}")
        self._check_deadline(call)

    def _is_verified_by_more(self, call: Call, price: int) -> bool:
        """A verified call costs as much as the calls that it makes: one for each of three operators, or of two if a third does
        not take calls. If an upstream of an operator fails, its next one is asked, and each has two at most."""
        asked, rest = divmod(price, call.price() // 3)
        again = sum(
            each.tree is call.tree and each.nature.streams and each.has_failed_lately for each in self.upstreams
        )
        return not self._is_calm and not rest and 2 <= asked <= 3 + again

    def _may_split(self, call: Call) -> bool:
        """A range of logs may be read in several pieces, and a head may pass a call's block on the archive's edge."""
        if call.method == "eth_getLogs":
            return True
        near_edge = len(call.params) > 1 and isinstance(call.params[1], str) and call.params[1].startswith("0x")
        return near_edge and abs(int(call.params[1], 16) - call.tree.tip.number + ARCHIVE_AFTER) < 20

    def _judge_error(self, call: Call, error: dict[str, Any]) -> None:
        code = error.get("code")
        is_limit = code == -32005 and (call.in_batch or "X-Socket" in call.directives)
        # The error that stands for a 5xx: the call costs nothing.
        is_ours = code == -32603
        self._end(call, "refused" if is_limit else "failed" if is_ours else "error", f"{code}")
        if is_limit and call.account.requests_per_second < 1000:
            return
        if code == -32000 and "already known" in str(error.get("message")):
            self.violate("once", f"{call!r} was sent twice")
        is_ours_to_avoid = self._is_ours_to_avoid(call, error) and not self._is_too_new(call, error)
        if code not in FAILURE_CODES or (self._must_succeed and is_ours_to_avoid):
            self.violate("error", f"{call!r} got the error {error}")

    def _is_ours_to_avoid(self, call: Call, error: dict[str, Any]) -> bool:
        """Whether a call should not have failed. It may if those that have the newest block are alone on its branch."""
        has_no_block = BLOCKLESS in str(error.get("message")) and self._is_alone(call.tree, call.tree.tip.number)
        return not has_no_block and not self._is_beyond_share(call, error)

    def _is_beyond_share(self, call: Call, error: dict[str, Any]) -> bool:
        """Whether a call may be refused because its account has too many under way, or because each of as many accounts as
        there are places has waited for as long: then its share is less than one call."""
        if not self._places or OVERLOADED not in str(error.get("message")):
            return False
        places = self._places * sum(each.tree is call.tree for each in self.upstreams)
        return not call.is_alone or self._waited_as_long(call) >= places

    def _waited_as_long(self, call: Call) -> int:
        """The other accounts with a call to the same network that was sent with this one or before, and is not done."""
        latest_s = call.sent_s + REPORTED_S
        return sum(
            any(each.tree is call.tree and each.sent_s <= latest_s for each in account.under_way)
            for account in self.accounts
            if account is not call.account
        )

    def _is_too_new(self, call: Call, error: dict[str, Any]) -> bool:
        """Whether a call that is not repeated may have met an upstream that did not have its block yet."""
        if call.directives.get("X-Retry") != "0" or error.get("message") != NO_BLOCK["message"]:
            return False
        lags_s = [each.nature.sees_after_s for each in self.upstreams if each.tree is call.tree]
        return call.tree.tip_at(call.sent_s - max(lags_s)).number < int(call.params[1], 16)

    def _check_share(self, call: Call) -> None:
        """A plain call that was its account's only one."""
        assert call.done_s is not None
        took_s = call.done_s - max(call.sent_s, call.written_s)
        if (
            self._is_calm
            and call.is_alone
            and not call.directives
            and call.method == "eth_call"
            and took_s > self._share_s
        ):
            self.violate("share", f"{call!r} took {took_s:.3f} s, and was the only one of its account")

    # Results

    def _judge_result(self, call: Call, result: Any) -> None:
        match call.method:
            case "eth_chainId":
                if result != "0x7a69":
                    self.violate("possible", f"{call!r}: chain {result}")
            case "eth_blockNumber":
                self._check_number(call, int(result, 16))
            case "eth_getBalance":
                self._check_balance(call, int(result, 16))
            case "eth_call":
                if result != answer_of(call.params[0]["data"]):
                    self.violate("possible", f"{call!r} got the answer to another call, of {len(result)} characters")
            case "eth_getBlockByNumber":
                self._check_block(call, result)
            case "eth_getLogs":
                self._check_logs(call, result)
            case _:
                pass

    def _check_number(self, call: Call, number: int) -> None:
        """The newest block of a call at `latest`."""
        tree, account = call.tree, call.account
        if number >= HEAD_LIE:
            self.violate("possible", f"{call!r} shows the lie of an upstream: block {number}")
            return
        if number > tree.tip.number + self._ahead(tree):
            self.violate("possible", f"{call!r} shows block {number}, and the newest is {tree.tip.number}")
        if number < call.min_block:
            self.violate("min-block", f"{call!r} shows block {number}, before {call.min_block}")
        if number < call.floor:
            self._went_back(call, number)
        if self._must_succeed and number < tree.tip_at(call.sent_s).number - CALM_AGE_BLOCKS:
            self.violate("possible", f"{call!r} shows block {number}, old at {call.sent_s:.3f} s")
        if number < call.named:
            self.violate("named", f"{call!r} shows block {number}, and its X-Block-Number is {call.named}")
        # The state of an account names no block to its reader.
        named = call.named if call.method == "eth_getBalance" else number
        # A number that the network has not reached is of a branch that an upstream is alone on: it goes back when it returns.
        account.seen.note(tree.name, call.via, min(named, tree.tip.number), self._history.now_s)

    def _went_back(self, call: Call, number: int) -> None:
        # A reliable upstream is at the network's tip, and has the block if the network had it when the call was sent.
        is_there = call.tree.tip_at(call.sent_s).number >= call.floor
        before_s = call.sent_s - REPORTED_S
        knows = any(
            each.tree is call.tree and each.is_reliable and each.has_reported(call.floor, call.via, before_s)
            for each in self.upstreams
        )
        if (self._must_succeed or (is_there and knows)) and not self._is_alone(call.tree, call.floor):
            self.violate("backwards", f"{call!r} shows block {number}, and the key had seen {call.floor}")
        else:
            self.outcomes["went back"] += 1

    def _is_alone(self, tree: BlockTree, number: int) -> bool:
        """Whether the upstreams with this block are alone on its branch, or were a moment ago: the network was reorganised, and
        at least half of the upstreams have not followed yet. Those with the block get no calls then (`branch`)."""
        members = [each for each in self.upstreams if each.tree is tree]
        now_s = self._history.now_s
        for tenths in range(round(10 * FORK_NOTICED_S) + 1):
            before_s = tenths / 10
            tip = tree.tip_at(now_s - before_s)
            heads = [each.head_before(before_s) for each in members]
            on_branch = [head for head in heads if head.is_on(tip)]
            has_block = [head for head in on_branch if head.number >= number]
            if len(on_branch) < len(heads) and 2 * len(has_block) <= len(heads):
                return True
        return False

    def _ahead(self, tree: BlockTree) -> int:
        """Upstreams with a branch of their own may be a little ahead of the network."""
        return 0 if self._is_calm else 2

    def _check_balance(self, call: Call, value: int) -> None:
        if value >= OTHER_CHAIN:
            self.violate("possible", f"{call!r} got a balance of another chain")
            return
        if value >= TRIAL_LIE:
            self.violate("trial", f"{call!r} got a balance of an upstream on trial")
            return
        if value >= LIE:
            if call.is_verified:
                self.violate("verified", f"{call!r} got a lie")
            self.outcomes["lies passed on"] += 1
            return
        found, tree = Balance.of(value), call.tree
        if found.owner != owner_of(call.params[0]):
            self.violate("possible", f"{call!r} got the balance of another address: {value:x}")
            return
        if call.params[1] == "latest":
            self._check_number(call, found.number)
        elif found.number != int(call.params[1], 16):
            self.violate("possible", f"{call!r} got the balance at block {found.number}")
        block = tree.find_branch(found.number, found.branch)
        if block is None:
            self.violate("possible", f"{call!r} got the balance of a block that does not exist: {found}")
        else:
            self._check_branch(call, block)

    def _check_block(self, call: Call, result: Any) -> None:
        if result is None:
            asked = call.params[0]
            if asked == "latest" or (asked.startswith("0x") and int(asked, 16) <= call.floor):
                self._went_back(call, 0)
            return
        number, block = int(result["number"], 16), call.tree.find(result["hash"])
        if block is not None:
            self._check_branch(call, block)
        elif number < HEAD_LIE:
            self.violate("possible", f"{call!r} got a block that does not exist: {result['hash']}")
        if call.params[0] == "latest":
            self._check_number(call, number)
        elif number != int(call.params[0], 16):
            self.violate("possible", f"{call!r} got block {number}")

    def _check_logs(self, call: Call, result: list[dict[str, Any]]) -> None:
        """Logs come from blocks that exist, in order, on one branch."""
        places = [(int(log["blockNumber"], 16), int(log["logIndex"], 16)) for log in result]
        if places != sorted(places) or len({*places}) != len(places):
            self.violate("possible", f"{call!r} got logs out of order: {places}")
        hashes = list(dict.fromkeys(log["blockHash"] for log in result))
        blocks = [call.tree.find(each) for each in hashes]
        if None in blocks:
            self.violate("possible", f"{call!r} got logs of a block that does not exist")
            return
        last = blocks[-1] if blocks else None
        if last is not None and not all(block is not None and block.is_on(last) for block in blocks):
            self.violate("possible", f"{call!r} got logs of two branches: {hashes}")

    def _check_branch(self, call: Call, block: Block) -> None:
        """The block that a result was read at."""
        tree, call.shows = call.tree, block
        if self._must_succeed and not any(map(block.is_on, tree.tips_since(call.sent_s - FORK_FOUND_S))):
            self.violate("branch", f"{call!r} shows {block!r}, which was replaced")
        if not block.private_to or call.sent_s - block.left_at_s < FORK_FOUND_S:
            return
        upstreams = [each for each in self.upstreams if each.tree is tree]
        if 2 * sum(each.voted_at(call.sent_s) for each in upstreams) > len(upstreams):
            self.violate("branch", f"{call!r} shows {block!r}, which left the network at {block.left_at_s:.3f} s")

    # Other rules

    def _check_missing_block(self, call: Call, newest: int) -> None:
        if newest >= call.min_block:
            self.violate("min-block", f"{call!r} was refused for block {call.min_block}, and {newest} is there")

    def _check_impossible(self, call: Call) -> None:
        """One attempt of two met the upstream with an impossible head. The other one goes to another upstream, and all others
        answer reliably."""
        others = [each for each in self.upstreams if each.tree is call.tree and not each.nature.head_liar]
        if others and not any(each.has_failed_lately for each in others):
            self.violate("error", f"{call!r} failed because of an impossible block, and all other upstreams answer")

    def _check_deadline(self, call: Call) -> None:
        assert call.done_s is not None
        limit_s = min(CALL_TIMEOUT_S, int(call.directives.get("X-Timeout-Ms", 1_000_000)) / 1000)
        took_s = call.done_s - max(call.sent_s, call.written_s)
        waits_s = 5.0 if call.in_batch else 0.0
        slack_s = self._own_slack_s if "X-Timeout-Ms" in call.directives else self._slack_s
        if took_s > limit_s + waits_s + slack_s and not call.directives.get("reads slowly"):
            self.violate("deadline", f"{call!r} took {took_s:.3f} s of {limit_s:.3f} s")

    def _check_early(self, call: Call) -> None:
        """A call that gave up has used the time that its client allowed."""
        assert call.done_s is not None
        limit_s = int(call.directives["X-Timeout-Ms"]) / 1000
        if call.done_s - call.sent_s < min(limit_s, CALL_TIMEOUT_S):
            self.violate("deadline", f"{call!r} gave up after {call.done_s - call.sent_s:.3f} of {limit_s:.3f} s")

    def _check_strangers(self, account: Account, body: bytes) -> None:
        for prefix, size in ((MARK_PREFIX, len(account.mark)), (KEY_PREFIX, len(account.key))):
            at = body.find(prefix)
            while at >= 0:
                found = body[at : at + size]
                for other in self.accounts if found not in (account.mark_bytes, account.key_bytes) else ():
                    if found in (other.mark_bytes, other.key_bytes):
                        self.violate("stranger", f"a reply to {account!r} shows something of {other!r}: {body[:200]!r}")
                at = body.find(prefix, at + 1)

    def _check_refusal(self, call: Call) -> None:
        """A bucket holds a second's worth. Anything taken more than a second ago has been refilled."""
        account = call.account
        assert call.done_s is not None
        since_s = call.sent_s - (LEASES_END_S if self._is_fleet else 1.0)
        recent = []
        for each in reversed(account.calls):
            if each.sent_s < since_s - LONGEST_CALL_S:
                break
            if each is not call and each.sent_s <= call.done_s and not _is_over(each, since_s):
                recent.append(each)
        part = SELDOM_REFUSED if self._is_fleet else 1.0
        requests, units = len(recent) + 1, sum(each.price() for each in recent) + call.price()
        if requests <= account.requests_per_second * part and units <= account.units_per_second * part:
            text = f"{requests} requests and {units} units since {since_s:.3f} s"
            self.violate("refusal", f"{call!r} was refused: {text}")

    def check_limits(self) -> None:
        """No stretch of time has more calls than its bucket holds and is refilled with."""
        for account in self.accounts:
            served = [call for call in account.calls if call.outcome in ("result", "error") and call.done_s is not None]
            served.sort(key=lambda each: each.done_s or 0.0)
            if account.requests_per_second < 1000:
                for first in served:
                    if text := self._above_limit(account, first, served):
                        self.violate("limit", f"{account!r} was served {text}")
                        break

    def _above_limit(self, account: Account, first: Call, served: list[Call]) -> str:
        """Whether too many calls were served from this one on: how many, if so. `served` is in the order of the replies."""
        count = units = 0
        for last in served:
            if last.sent_s < first.sent_s or last.done_s is None:
                continue
            count, units = count + 1, units + last.units
            took_s = last.done_s - first.sent_s
            # Seconds of refill beyond a full bucket.
            requests_s = (count - 1) / account.requests_per_second - 1.0 - took_s
            units_s = (units - 1) / account.units_per_second - 1.0 - took_s
            if max(requests_s, units_s) > 0.0:
                calls, excess_s = self._excess(first.sent_s, last.done_s)
                requests_s -= excess_s + calls / account.requests_per_second
                units_s -= excess_s + calls * ARCHIVE_PRICE / account.units_per_second
                if max(requests_s, units_s) > 0.0:
                    return f"{count} requests and {units} units in {took_s:.3f} s"
        return ""

    def check_trial(self, upstream: SimUpstream) -> None:
        """Called at the end for an upstream on trial."""
        if upstream.executed:
            self.violate("trial", f"{upstream!r} is on trial and got {upstream.executed.total()} writes")
        if upstream.calls["eth_getBalance"]:
            self._history.covers("copied to trial")

    def check_writes(self, executed: Counter[str]) -> None:
        for raw, count in executed.items():
            if raw not in self.writes:
                self.violate("once", f"an upstream executed {raw[:20]}, which no client sent")
            elif count > 1:
                self.violate("once", f"{self.writes[raw]!r} was executed {count} times")
        for raw, call in self.writes.items():
            if call.outcome == "result" and not executed[raw]:
                self.violate("possible", f"{call!r} was reported as sent, and no upstream has it")

    def check_repeats(self) -> None:
        """A call is sent to upstreams a few times at most, whatever they do."""
        for id_, count in sum([each.attempts for each in self.upstreams], Counter[int]()).items():
            if count > MOST_SENT:
                self.violate("repeats", f"call {id_} was sent to upstreams {count} times")

    def check_usage(self, account: Account, units: int) -> None:
        """Usage covers every call that was served, and no call that was never made."""
        least = account.events + sum(call.units for call in account.calls if call.outcome in ("result", "error"))
        unknown = [call for call in account.calls if call.outcome not in ("result", "error", "refused", "failed")]
        most = least + account.malformed + sum(max(call.price(), ARCHIVE_PRICE) for call in unknown)
        failed = sum(call.price() for call in account.calls if call.outcome == "failed" and call.is_paid_if_it_fails)
        self._compare_usage(account, units, least, most + failed)

    def _replay_price(self) -> int:
        """Each call of a replay costs its list price: no more than all such calls that upstreams have answered."""
        counts = sum((upstream.calls for upstream in self.upstreams), Counter[str]())
        return sum(counts[method] * PRICES.get(method, 2) for method in REPLAY_METHODS)

    def _compare_usage(self, account: Account, units: int, least: int, most: int) -> None:
        edge = sum(ARCHIVE_PRICE for call in account.calls if self._may_split(call))
        subscriptions = [call for call in account.calls if call.method == "eth_subscribe"]
        if any("fromBlock" in str(call.params) for call in subscriptions):
            most += self._replay_price()
        # Events that were on their way when a socket ended.
        most += EVENTS_ON_THE_WAY * len(subscriptions)
        if not least - edge <= units <= most + edge:
            self.violate("charge", f"{account!r} was charged {units} units, expected {least} to {most}")


def _is_over(each: Call, since_s: float) -> bool:
    """Whether it took nothing from the bucket since that time."""
    return each.outcome == "refused" or (each.done_s is not None and each.done_s < since_s)


def _is_failure(status: int, error: dict[str, Any]) -> bool:
    """Whether the status is one that failing upstreams explain."""
    return status in FAILURES or (status == 500 and str(error.get("message")).startswith(BLAMES_UPSTREAM))


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
