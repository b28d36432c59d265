"""Verified replies: upstreams of several operators must agree on a reply, or the chain's hashes must prove it.

A call that needs verification leaves the usual path: this module asks chosen upstreams itself and answers the caller once.
Each operator has one vote, and too few operators are an error: no failover and no load makes the quorum smaller.
Nothing that could not be verified is passed on. An upstream that contradicts the others, or a proof, is counted and logged, and
both replies are kept; one that keeps doing so takes no calls (`UpstreamHealth.contradicted`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from proxy import telemetry
from proxy.chains.family import NeverProvable, Prover, Refuted, Unprovable
from proxy.core import upstream_errors
from proxy.core.access import Key
from proxy.core.contradictions import MOST_PARAMS, MOST_REPLY, ContradictedReply, ContradictionKind, cut
from proxy.core.directives import Directives
from proxy.core.request_records import VERIFYING, shown_text
from proxy.core.verification import (
    PROOF_QUORUM,
    Ballot,
    Verification,
    agreed_error,
    agreed_result,
    digest_of,
    digest_of_error,
)
from proxy.errors import (
    BehindBlock,
    DeadlinePassed,
    Fault,
    InternalError,
    InvalidRequest,
    NotVerified,
    RateLimited,
    Unavailable,
)
from proxy.services.accounts.metering import Meter, Meters
from proxy.services.rpc.calls import PendingReply, RpcError, call_upstream
from proxy.services.rpc.flights import Call, Caller, Flight, next_id
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.reply_checks import SMALL, off_loop
from proxy.tasks import Tasks
from proxy.tracing import CallTrace, Span, below, current_span
from proxy.wire.upstream import Upstream

log = logging.getLogger("penstock.verifier")
T = TypeVar("T")
# The method by which other upstreams confirm the block that a proof starts from.
CONFIRMS = "eth_getBlockByNumber"
# Upstreams that may be asked to confirm a block.
MOST_CONFIRMING = 4
# Calls that are being verified or wait for it, in all and of one account; those of one account that run at a time; and how
# long one may take, with its wait.
MOST_KNOWN, MOST_KNOWN_OF_ACCOUNT, MOST_OF_ACCOUNT = 4_096, 256, 8
LONGEST_S = 30.0
# How long it may wait for its account's units.
PAYING_S = 0.8 * LONGEST_S
# Pause between two looks at the upstreams' heads while a call waits for a block.
BLOCK_CHECK_S = 0.05
# Characters of a contradiction that operators see.
MOST_SHOWN = 300
# Larger results are not compared.
MOST_COMPARED = 4 << 20
# Errors of reading a reply. One upstream must not keep others from verifying a call.
UNREADABLE = (msgspec.DecodeError, RecursionError, ValueError)
# A caller, the policy of its method, and its params.
VerifiableCall: TypeAlias = tuple[Caller, MethodPolicy, bytes]
OnContradiction: TypeAlias = Callable[[ContradictedReply], None]


@dataclass(frozen=True, slots=True)
class ReplyVote:
    """The reply of one upstream to a call that several are asked: the vote of its operator. Without a digest, it is too large
    to compare."""

    upstream: Upstream
    digest: str
    result: bytes = b""
    error: bytes = b""


class VerifiedAnswer:
    """Answers a caller once, and counts the outcome."""

    def __init__(self, caller: Caller, how: Verification, meter: Meter) -> None:
        """`meter`: holds what the caller has paid, and pays for further calls."""
        self._caller = caller
        self._how = how
        self._meter = meter
        self._price = caller.units
        # Empty until the caller has been answered.
        self.outcome = ""

    def __repr__(self) -> str:
        return f"<VerifiedAnswer by {self._how}>"

    def result(self, result: bytes) -> None:
        if self._is_first("verified"):
            self._caller.on_source(str(self._how), 0)
            self._caller.on_charged(self._further())
            self._caller.on_result(result)

    def error(self, error: bytes) -> None:
        if self._is_first("verified"):
            self._caller.on_source(str(self._how), 0)
            self._caller.on_charged(self._further())
            self._caller.on_error(error)

    def fault(self, fault: Fault) -> None:
        if self._is_first("failed"):
            fault.keep(self._further())
            self._caller.on_fault(fault)

    def _further(self) -> int:
        """The units of calls beyond the price that the caller has paid. Calls after the answer are not charged."""
        if self._caller.flight is not None:
            self._caller.flight.add_cost(self._meter.cost)
        return self._meter.settle(self._price) - self._price

    def _is_first(self, outcome: str) -> bool:
        if self.outcome:
            return False
        self.outcome = outcome
        self._caller.on_waited(self._meter.waited_s)
        telemetry.verifications_total.labels(self._how.kind, outcome).inc()
        return True


class Verifier:
    """Answers the calls that need verification."""

    def __init__(self, tasks: Tasks, meters: Meters, on_contradiction: OnContradiction = lambda _: None) -> None:
        """`meters`: charge callers for calls beyond those that they have paid for."""
        self._tasks = tasks
        self._meters = meters
        self._on_contradiction = on_contradiction
        # The turns of each account, and how many of its calls run or wait.
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._known: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Verifier {self._known.total()} calls of {len(self._known)} accounts>"

    def known(self, client: str) -> int:
        """The calls of an account that are being verified, or wait for it."""
        return self._known[client]

    def start(self, call: VerifiableCall, route: Route, how: Verification, *, key: Key, directives: Directives) -> None:
        """Answer the caller later, with a verified reply or a fault."""
        caller, policy, params = call
        client = key.account.id
        meter = self._meters.open(key, prepaid=caller.units, within_s=PAYING_S)
        answer = VerifiedAnswer(caller, how, meter)
        # It is never sent: it lists the attempts for the record of the request, and has the block of the reply.
        flight = route.dispatcher.new_flight(Call(policy, params, client=client), caller, time.monotonic())
        caller.on_flight(flight)
        verified = VerifiedCall(route, flight, how, meter, directives, self._on_contradiction)
        if self._known[client] >= MOST_KNOWN_OF_ACCOUNT:
            answer.fault(RateLimited("this account verifies too many calls: make fewer at a time", retry_after_s=1))
            return
        if self._known.total() >= MOST_KNOWN:
            answer.fault(Unavailable("too many calls are being verified: try again shortly"))
            return
        self._known[client] += 1
        self._tasks.start_once("verification", lambda: self._run(answer, verified, client), of=next_id())

    async def _run(self, answer: VerifiedAnswer, call: VerifiedCall, client: str) -> None:
        """Verify a call in its account's turn."""
        turn = self._turns.setdefault(client, asyncio.Semaphore(MOST_OF_ACCOUNT))
        try:
            with below(current_span.get(), "verification") as span:
                if span is not None:
                    call.trace_below(span)
                await _answer(answer, call, turn)
                if span is not None:
                    span.set({"penstock.verify": str(call.how), "penstock.outcome": answer.outcome})
        finally:
            self._known[client] -= 1
            if not self._known[client]:
                del self._known[client], self._turns[client]


async def _answer(answer: VerifiedAnswer, call: VerifiedCall, turn: asyncio.Semaphore) -> None:
    try:
        call.refuse_if_in_vain()
        async with asyncio.timeout(call.longest_s), turn:
            await call.reach_block()
            if call.prover is not None:
                answer.result(await call.proven(call.prover))
            else:
                await call.vote(answer)
    except TimeoutError:
        answer.fault(call.late())
    except RpcError as exc:
        answer.error(exc.error)
    except Fault as fault:
        answer.fault(fault)
    except Exception:
        log.exception("a verification failed")
        answer.fault(InternalError("the reply could not be verified"))


class VerifiedCall:
    """One call to verify. `meter` pays for the calls that it takes."""

    def __init__(
        self,
        route: Route,
        flight: Flight,
        how: Verification,
        meter: Meter,
        directives: Directives,
        on_contradiction: OnContradiction,
    ) -> None:
        self.how = how
        self._on_contradiction = on_contradiction
        # None for a quorum.
        self.prover = flight.policy.family.prover if how.kind == "proof" else None
        self._directives = directives
        self._route = route
        self._flight = flight
        self._policy = flight.policy
        self._params = flight.params
        self._meter = meter
        self._client = meter.key.account.id
        self._method = flight.policy.method.name
        # Calls to upstreams.
        self._under_way: dict[PendingReply, Upstream] = {}
        # For sampled requests.
        self._trace: CallTrace | None = None

    def __repr__(self) -> str:
        return f"<VerifiedCall {self._method}>"

    def trace_below(self, span: Span) -> None:
        """The request is sampled: trace its calls to upstreams below this span."""
        self._trace = CallTrace(span)

    def refuse_if_in_vain(self) -> None:
        reason = why_never(self._route, self._policy, self._params, self.how)
        if reason:
            raise _refused(self._method, self.how, reason)

    # Directives

    @property
    def longest_s(self) -> float:
        own = self._directives.timeout_ms / 1000
        return min(own or LONGEST_S, LONGEST_S)

    def late(self) -> Fault:
        if self.longest_s < LONGEST_S:
            reason = f"not verified within {self._directives.timeout_ms} ms, the request's X-Timeout-Ms"
            return DeadlinePassed(reason)
        return NotVerified(f"not verified within {LONGEST_S:g} s")

    async def reach_block(self) -> None:
        """Wait until as many upstreams as are needed have the block of X-Min-Block. Raises BehindBlock after the wait."""
        block, state = self._directives.min_block, self._route.state
        deadline = time.monotonic() + self._directives.min_block_wait
        while block and not self._has_enough():
            if time.monotonic() >= deadline:
                newest = max([state.heads.tip, *[member.head for member in state.group.members]])
                raise BehindBlock(state.network_id, block, newest)
            await asyncio.sleep(BLOCK_CHECK_S)

    def _has_enough(self) -> bool:
        needed = min(self.how.needed, len(self._route.upstreams))
        return bool(self.upstreams()) and len(operators_of(self.confirming())) >= needed

    def _note(self, asked: PendingReply, outcome: str) -> None:
        """List an attempt in the record of the request. After the answer there is none to add it to."""
        upstream, flight = self._under_way.pop(asked, None), asked.flight
        if upstream is not None and flight is not None:
            health, method = upstream.health, flight.policy.method.name
            named = f" by {health.operator_name}" if health.operator_name != health.label else ""
            text = f"{VERIFYING}{method}{named}, {outcome}"
            self._flight.note(upstream, flight.began, time.monotonic(), text)

    def note_late(self) -> None:
        """The caller is answered before these attempts have ended."""
        for asked in [*self._under_way]:
            self._note(asked, "not waited for")

    def read_at(self, head: int) -> None:
        """The reply is of the state at this block or a later one."""
        self._flight.read_at(head)

    # Quorum

    async def vote(self, answer: VerifiedAnswer) -> None:
        """Answer as soon as enough operators agree. The others are waited for afterwards, to learn whether they disagree."""
        needed, chosen = self.how.needed, [*operators_of(self.upstreams()).values()][: self.how.asked]
        if len(chosen) < needed:
            reason = f"{self.how} needs {needed} operators, and upstreams of {len(chosen)} take calls now"
            raise Unavailable(f"not verified: {reason}{self._missing({each[0].health.operator for each in chosen})}")
        for _ in chosen:
            await self._meter.pay(self._price)
        head = self._read_at_common_head([each[0] for each in chosen])
        ballot, winner, votes, is_too_large = Ballot(needed), None, list[ReplyVote](), False
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._vote_of_operator(upstreams, head)) for upstreams in chosen]
            for each in asyncio.as_completed(asked):
                vote = await each
                if vote is None or not vote.digest:
                    is_too_large |= vote is not None
                    continue
                votes.append(vote)
                if ballot.add(vote.digest, vote.upstream.health.operator) and winner is None:
                    winner = vote
                    self.note_late()
                    agreed = [other for other in votes if other.digest == vote.digest]
                    await _answer_agreed(answer, agreed, self._policy.volatile)
        if winner is None and is_too_large:
            raise NotVerified(f"not verified: results above {MOST_COMPARED >> 20} MiB are too large to compare")
        if winner is None:
            log.warning(
                "upstreams disagree, and no quorum was reached",
                extra={
                    "network": self._route.network.id,
                    "method": self._method,
                    "votes": {digest: sorted(operators) for digest, operators in ballot.votes.items()},
                },
            )
            self._note_split(votes)
            voters = {vote.upstream.health.operator for vote in votes}
            reason = f"fewer than {needed} of {len(chosen)} operators agree"
            raise NotVerified(f"not verified: {reason}{self._missing(voters)}")
        agreed = [vote for vote in votes if vote.digest == winner.digest]
        for vote in votes:
            if vote.digest != winner.digest and await self._is_wrong(vote, winner):
                self._blame(vote.upstream, reply=vote.digest, agreed=winner.digest)
                self._keep("outvoted", vote, agreed)

    def _missing(self, voters: Collection[str]) -> str:
        """Names the operators that could vote, but take no calls or do not answer."""
        operators = operators_of(offering(self._route, [self._method]))
        names = [
            upstreams[0].health.operator_name for operator, upstreams in operators.items() if operator not in voters
        ]
        return f"; missing: {', '.join(sorted(names))}" if names else ""

    async def _vote_of_operator(self, upstreams: Sequence[Upstream], head: int) -> ReplyVote | None:
        """The reply of the first of an operator's upstreams that has the block and answers. The first call is paid for."""
        for index, upstream in enumerate([each for each in upstreams if each.health.head >= head]):
            if index and not await self._has_paid():
                return None
            if (vote := await self._vote(upstream)) is not None:
                return vote
        return None

    async def _has_paid(self) -> bool:
        """Whether the account can pay for one more call."""
        try:
            await self._meter.pay(self._price)
        except Fault:
            return False
        return True

    @property
    def _price(self) -> int:
        return self._route.state.price(self._policy, self._params)

    async def _vote(self, upstream: Upstream) -> ReplyVote | None:
        """The reply of one upstream; None if it fails, which counts neither as agreement nor as contradiction."""
        try:
            return await self._counted(upstream)
        except (Fault, *UNREADABLE):
            return None

    async def _counted(self, upstream: Upstream) -> ReplyVote | None:
        try:
            result = await self._ask(upstream, self._policy, self._params)
        except RpcError as exc:
            # An upstream that is overloaded, or does not have the method, says nothing about the chain.
            verdict = upstream_errors.classify(exc.error, self._policy.family.error_rules)
            if verdict.blame or verdict.kind == "unsupported":
                return None
            return ReplyVote(upstream, digest_of_error(exc.error, self._policy.volatile), error=exc.error)
        if len(result) > MOST_COMPARED:
            return ReplyVote(upstream, "")
        return ReplyVote(upstream, await self._digest_of(result), result=result)

    async def _is_wrong(self, vote: ReplyVote, winner: ReplyVote) -> bool:
        """Whether the reply is a contradiction that counts. The upstream is asked again: its reply may have been garbled."""
        if not self._are_determined(vote, winner):
            return False
        again = await self._vote(vote.upstream)
        return again is not None and again.digest == vote.digest

    def _are_determined(self, vote: ReplyVote, other: ReplyVote) -> bool:
        """Whether the chain determines both replies, so that one of them is wrong if they differ."""
        prover = self._policy.family.prover
        if prover is None or not prover.covers(self._method) or vote.error or other.error:
            return False
        # Upstreams may differ about blocks that are not final, about tags, and about the data that they keep.
        return self._is_fixed() and b"null" not in (vote.result, other.result)

    def _note_split(self, votes: Sequence[ReplyVote]) -> None:
        """Keep replies that contradict each other, if one of them must be wrong. Which one is not known."""
        # In the order of the settings, so that repetitions are recognised.
        in_order = sorted(votes, key=lambda vote: vote.upstream.health.index, reverse=True)
        for second, first in itertools.combinations({vote.digest: vote for vote in in_order}.values(), 2):
            if self._are_determined(first, second):
                telemetry.split_votes_total.labels(self._route.network.id).inc()
                self._keep("split", first, [vote for vote in votes if vote.digest == second.digest])
                return

    def _is_fixed(self) -> bool:
        """Whether the call is about a block, or blocks, that cannot be replaced, or about a block by its hash, which determines
        its state and its logs."""
        policy, heads = self._policy, self._route.heads
        ref = policy.family.block_ref(policy.method, self._params)
        if ref.block_hash:
            return True
        if policy.by_range:
            return not ref.moves and policy.last_block(self._params, heads.tip) <= heads.final
        return ref.kind == "number" and 0 <= ref.number <= heads.final

    def _read_at_common_head(self, chosen: Sequence[Upstream]) -> int:
        """Put the newest block that all of these upstreams have into the params, in place of `latest`. Returns the block."""
        at_block, head = self._policy.family.at_block, min(each.health.head for each in chosen)
        self.read_at(head)
        if at_block is not None and head:
            self._params = at_block(self._policy.method, self._params, head)
        return head

    # Proof

    async def proven(self, prover: Prover) -> bytes:
        params, failures = msgspec.json.decode(self._params), []
        # A call that no upstream can prove says nothing about them: they are blamed only if another one proves it.
        suspects: list[tuple[UpstreamSource, str]] = []
        for upstream in self.upstreams():
            source = UpstreamSource(self, upstream)
            try:
                result = await prover.prove(self._method, params, source)
                if suspects:
                    await self._blame_refuted(
                        suspects, ReplyVote(upstream, await self._digest_of(result), result=result)
                    )
                return result
            except NeverProvable as exc:
                raise _refused(self._method, self.how, str(exc)) from None
            except Unprovable as exc:
                failures.append(str(exc))
            except Refuted as exc:
                failures.append(str(exc))
                if source.is_complete and await self._is_refuted_again(prover, source, params):
                    suspects.append((source, str(exc)))
            except RpcError as exc:
                failures.append(f"an upstream does not have what the proof needs: {exc.error.decode()}")
            except RateLimited:
                raise  # The account has no more units.
            except Fault as exc:
                failures.append(exc.message)
        if not failures:
            raise Unavailable("not verified: no upstream takes calls")
        raise NotVerified(f"not verified: {failures[-1]}")

    async def _is_refuted_again(self, prover: Prover, source: UpstreamSource, params: Any) -> bool:
        """A block may have been replaced between two calls of a proof."""
        try:
            await prover.prove(self._method, params, source)
        except (Unprovable, RpcError, Fault):
            return False
        except Refuted:
            return source.is_complete
        return False

    async def _blame_refuted(self, suspects: Sequence[tuple[UpstreamSource, str]], proven: ReplyVote) -> None:
        for source, reason in suspects:
            self._blame(source.upstream, reason=reason)
            reply = await off_loop(msgspec.json.encode, source.last_reply)
            vote = ReplyVote(source.upstream, await self._digest_of(reply), result=reply)
            self._keep("refuted", vote, [proven], reason)

    async def _digest_of(self, result: bytes) -> str:
        digest = partial(digest_of, volatile=self._policy.volatile)
        return digest(result) if len(result) <= SMALL else await off_loop(digest, result)

    def _keep(self, kind: ContradictionKind, vote: ReplyVote, others: Sequence[ReplyVote], reason: str = "") -> None:
        """Keep a reply and the one that contradicts it."""
        self._on_contradiction(
            ContradictedReply(
                at=time.time(),
                network=self._route.network.id,
                method=self._method,
                params=shown_text(cut(self._params, MOST_PARAMS), MOST_PARAMS),
                kind=kind,
                verified_by=str(self.how),
                upstream=vote.upstream.label,
                operator=vote.upstream.health.operator,
                reply=cut(vote.result, MOST_REPLY),
                digest=vote.digest,
                others=tuple((each.upstream.label, each.upstream.health.operator) for each in others),
                other_reply=cut(others[0].result, MOST_REPLY),
                other_digest=others[0].digest,
                reason=reason[:MOST_SHOWN],
            )
        )

    def _blame(self, upstream: Upstream, **details: str) -> None:
        log.warning("upstream contradicted", extra={"upstream": upstream.label, "method": self._method, **details})
        telemetry.contradictions_total.labels(upstream.label).inc()
        shown = ", ".join(f"{name} {text}" for name, text in details.items())
        upstream.health.contradicted(time.monotonic(), f"{self._method}: {shown}"[:MOST_SHOWN])

    # Upstreams

    def upstreams(self) -> list[Upstream]:
        """The upstreams that may serve the call, the fastest first."""
        return self._able([self._method] if self.prover is None else self.prover.needs(self._method))

    def confirming(self) -> list[Upstream]:
        """The upstreams that may confirm the reply, the fastest first: all of it, or the block that a proof starts from."""
        return self._able([self._method if self.prover is None else CONFIRMS])

    def _able(self, methods: Collection[str]) -> list[Upstream]:
        now, least = time.monotonic(), self._directives.min_block
        # An upstream that reports no head could present any old state as the latest.
        least = max(least, 1 if self._route.heads.tip else 0)
        able = [
            each
            for each in offering(self._route, methods)
            if each.health.takes_calls(now) and not each.health.lagging and each.health.head >= least
        ]
        return sorted(able, key=lambda each: each.health.latency_s)

    @property
    def has_one_upstream(self) -> bool:
        return len(self._route.upstreams) == 1

    async def _ask(self, upstream: Upstream, policy: MethodPolicy, params: bytes) -> bytes:
        to = self._route.dispatcher
        asked = call_upstream(
            to, policy, params, upstream=upstream, client=self._client, payer=self._meter, trace=self._trace
        )
        self._under_way[asked] = upstream
        outcome = "given up"
        try:
            result = await asked.result()
            outcome = "answered"
            return result
        except RpcError:
            outcome = "error"
            raise
        except Fault as fault:
            outcome = fault.message
            raise
        finally:
            self._note(asked, outcome)

    async def ask(self, upstream: Upstream, method: str, params: Sequence[Any]) -> Any:
        """The decoded result of another call, which a proof needs."""
        policy = self._route.policies.get(method)
        if policy is None:
            raise InvalidRequest(f"the network has no {method}, which the proof needs")
        raw = msgspec.json.encode(params)
        await self._meter.pay(self._route.state.price(policy, raw))
        return msgspec.json.decode(await self._ask(upstream, policy, raw))


class UpstreamSource:
    """One upstream, as a proof asks it. `is_complete`: the upstream gave every reply of the proof itself."""

    def __init__(self, call: VerifiedCall, upstream: Upstream) -> None:
        self._call = call
        self.upstream = upstream
        # The upstream's last reply, which a failed proof is about.
        self.last_reply: Any = None
        others = [each for each in call.confirming() if each.health.operator != upstream.health.operator]
        self._others = others[: MOST_CONFIRMING - 1]
        self.head = min(each.health.head for each in (upstream, *self._others[: PROOF_QUORUM - 1]))
        self.is_complete = True
        call.read_at(self.head)

    def __repr__(self) -> str:
        return f"<UpstreamSource {self.upstream.label}>"

    async def ask(self, method: str, params: Sequence[Any]) -> Any:
        self.last_reply = await self._call.ask(self.upstream, method, params)
        return self.last_reply

    async def ask_or_none(self, method: str, params: Sequence[Any]) -> Any:
        if not self.upstream.health.may_serve(method):
            return None
        try:
            return await self.ask(method, params)
        except RpcError:
            return None

    async def confirm(self, ref: str, block_hash: str) -> bool:
        """Whether an upstream of another operator has this block too. The only upstream of a network confirms itself. If there
        are others and none of them answers, the block is not confirmed: the upstream may have claimed a head that they do not
        have."""
        self.is_complete = True
        is_answered = self._call.has_one_upstream
        for other in self._others:
            try:
                block = await self._call.ask(other, CONFIRMS, [ref, False])
            except RateLimited:
                raise
            except (RpcError, Fault, *UNREADABLE):
                continue
            is_answered = True
            if isinstance(block, dict) and str(block.get("hash")).lower() == block_hash.lower():
                return True
        # Which of them is wrong is not known.
        self.is_complete = self._call.has_one_upstream
        if not is_answered:
            raise Unprovable("no upstream of another operator can confirm the block at the moment")
        return self._call.has_one_upstream

    async def off_loop(self, check: Callable[..., T], *values: Any) -> T:
        return await off_loop(check, *values)


async def _answer_agreed(answer: VerifiedAnswer, votes: Sequence[ReplyVote], volatile: frozenset[str]) -> None:
    if votes[0].error:
        answer.error(agreed_error([vote.error for vote in votes], volatile))
        return
    results = [vote.result for vote in votes]
    agree = partial(agreed_result, results, volatile)
    answer.result(agree() if len(results[0]) <= SMALL else await off_loop(agree))


def _refused(method: str, how: Verification, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{method} cannot be verified by {how}: {reason}")


# Calls that can never be verified, as far as their params and the configuration say. No retry helps, so they are refused.


def why_never(route: Route, policy: MethodPolicy, params: bytes, how: Verification) -> str:
    """Why the call can never be verified; empty if it may be."""
    return _without_quorum(route, policy, how) if how.kind == "quorum" else _without_proof(route, policy, params)


def offering(route: Route, methods: Collection[str]) -> Sequence[Upstream]:
    """The upstreams that are configured to serve all of these methods."""
    if not all(method in route.policies for method in methods):
        return ()
    return [each for each in route.upstreams if all(map(each.health.may_serve, methods))]


def operators_of(upstreams: Iterable[Upstream]) -> dict[str, list[Upstream]]:
    """The upstreams of each operator, in the given order."""
    operators: dict[str, list[Upstream]] = {}
    for each in upstreams:
        operators.setdefault(each.health.operator, []).append(each)
    return operators


def _without_quorum(route: Route, policy: MethodPolicy, how: Verification) -> str:
    method = policy.method.name
    count = len(operators_of(offering(route, (method,))))
    if count >= how.needed:
        return ""
    return f"it needs upstreams of {how.needed} operators, and {route.network.id} has {count} with {method}"


def _without_proof(route: Route, policy: MethodPolicy, params: bytes) -> str:
    method, prover = policy.method.name, policy.family.prover
    if prover is None or not prover.covers(method):
        return "the chain's hashes do not prove replies of this method"
    needs = prover.needs(method)
    if not offering(route, needs):
        return f"no upstream of {route.network.id} has {' and '.join(needs)}, which the proof needs"
    if len(route.upstreams) > 1 and len(operators_of(offering(route, (CONFIRMS,)))) < PROOF_QUORUM:
        return f"{route.network.id} has no upstream of a second operator with {CONFIRMS}, which confirms the block"
    return prover.why_not(method, msgspec.json.decode(params))
