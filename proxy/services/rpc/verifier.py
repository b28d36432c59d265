"""Verified replies: a call is asked of several upstreams that must agree, or its reply is proven by the chain's hashes.

A call that needs verification leaves the usual path: this module asks chosen upstreams itself and answers the caller once.
Nothing that could not be verified is passed on. An upstream that contradicts the others, or a proof, is counted and logged; one
that keeps doing so takes no calls (`UpstreamHealth.contradicted`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import msgspec

from proxy import telemetry
from proxy.chains.family import NeverProvable, Prover, Refuted, Unprovable
from proxy.core.directives import Directives
from proxy.core.request_records import VERIFYING
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
from proxy.services.rpc.calls import PendingReply, RpcError, call_upstream
from proxy.services.rpc.flights import Caller, Flight, next_id
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.unverifiable import CONFIRMS, offering, why_never
from proxy.services.rpc.verified_answer import ReplyVote, VerifiedAnswer
from proxy.tasks import Tasks
from proxy.tracing import CallTrace, below, current_span
from proxy.wire.upstream import Upstream

log = logging.getLogger("penstock.verifier")
T = TypeVar("T")
# Upstreams that may be asked to confirm a block.
MOST_CONFIRMING = 4
# Calls that are being verified or wait for it, in all and of one account; those of one account that run at a time; and how
# long one may take, with its wait.
MOST_KNOWN, MOST_KNOWN_OF_ACCOUNT, MOST_OF_ACCOUNT = 4_096, 256, 8
LONGEST_S = 30.0
# Pause between two looks at the upstreams' heads while a call waits for a block.
BLOCK_CHECK_S = 0.05
# Characters of a contradiction that operators see.
MOST_SHOWN = 300
# Larger results are not compared. Those above SMALL are read in the thread.
MOST_COMPARED, SMALL = 4 << 20, 1 << 14
# Checks take turns in one thread of their own: more would starve the loop, and the default ones compress replies of others.
_checks = ThreadPoolExecutor(1, "verifier")
# Errors of reading a reply. One upstream must not keep others from verifying a call.
UNREADABLE = (msgspec.DecodeError, RecursionError, ValueError)
# A caller, the policy of its method, and its params.
VerifiableCall: TypeAlias = tuple[Caller, MethodPolicy, bytes]


class Verifier:
    """Answers the calls that need verification."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        # The turns of each account, and how many of its calls run or wait.
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._known: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Verifier {self._known.total()} calls of {len(self._known)} accounts>"

    def known(self, client: str) -> int:
        """The calls of an account that are being verified, or wait for it."""
        return self._known[client]

    def start(
        self, call: VerifiableCall, route: Route, how: Verification, *, client: str, directives: Directives
    ) -> None:
        """Answer the caller later, with a verified reply or a fault."""
        caller, policy, params = call
        answer = VerifiedAnswer(caller, how)
        # It is never sent: it lists the attempts for the record of the request, and has the block of the reply.
        caller.flight = flight = route.dispatcher.new_flight(policy, params, caller, time.monotonic())
        verified = VerifiedCall(route, flight, how, client, directives)
        if self._known[client] >= MOST_KNOWN_OF_ACCOUNT:
            answer.fault(RateLimited("this account verifies too many calls: make fewer at a time", retry_after_s=1))
            return
        if self._known.total() >= MOST_KNOWN:
            answer.fault(Unavailable("too many calls are being verified: try again shortly"))
            return
        self._known[client] += 1
        self._tasks.start(f"verification {next_id()}", lambda: self._run(answer, verified, client))

    async def _run(self, answer: VerifiedAnswer, call: VerifiedCall, client: str) -> None:
        """Verify a call in its account's turn."""
        turn = self._turns.setdefault(client, asyncio.Semaphore(MOST_OF_ACCOUNT))
        try:
            with below(current_span.get(), "verification") as span:
                call.trace = None if span is None else CallTrace(span)
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
    """One call to verify. `client`: the account that made it."""

    def __init__(self, route: Route, flight: Flight, how: Verification, client: str, directives: Directives) -> None:
        self.how = how
        # None for a quorum.
        self.prover = flight.policy.family.prover if how.kind == "proof" else None
        self._directives = directives
        self._route = route
        self._flight = flight
        self._policy = flight.policy
        self._params = flight.params
        self._client = client
        self._method = flight.policy.method.name
        # Calls to upstreams.
        self._under_way: dict[PendingReply, Upstream] = {}
        # Set for sampled requests.
        self.trace: CallTrace | None = None

    def __repr__(self) -> str:
        return f"<VerifiedCall {self._method}>"

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
        return bool(self.upstreams()) and len(self.confirming()) >= needed

    def _note(self, asked: PendingReply, outcome: str) -> None:
        """List an attempt in the record of the request. After the answer there is none to add it to."""
        upstream, flight = self._under_way.pop(asked, None), asked.flight
        if upstream is not None and flight is not None:
            text = f"{VERIFYING}{flight.policy.method.name}, {outcome}"
            self._flight.note(upstream, flight.began, time.monotonic(), text)

    def note_late(self) -> None:
        """The caller is answered before these attempts have ended."""
        for asked in [*self._under_way]:
            self._note(asked, "not waited for")

    def read_at(self, head: int) -> None:
        """The reply is of the state at this block or a later one."""
        self._flight.block = head

    # Quorum

    async def vote(self, answer: VerifiedAnswer) -> None:
        """Answer as soon as enough upstreams agree. The others are waited for afterwards, to learn whether they disagree."""
        needed, chosen = self.how.needed, self.upstreams()[: self.how.asked]
        if len(chosen) < needed:
            raise Unavailable(f"not verified: {self.how} needs {needed} upstreams, and {len(chosen)} take calls now")
        self._params = self._at_common_head(chosen)
        ballot, winner, votes = Ballot(needed), None, list[ReplyVote]()
        async with asyncio.TaskGroup() as group:
            for each in asyncio.as_completed([group.create_task(self._vote(upstream)) for upstream in chosen]):
                found = await each
                if found is None:
                    continue
                votes.append(found)
                if ballot.add(found.digest, found.upstream.label) and winner is None:
                    winner = found
                    self.note_late()
                    await _answer_agreed(answer, [vote for vote in votes if vote.digest == found.digest])
        if winner is None:
            log.warning(
                "upstreams disagree, and no quorum was reached",
                extra={"network": self._route.network.id, "method": self._method, "votes": ballot.votes},
            )
            raise NotVerified(f"not verified: fewer than {needed} of {len(chosen)} upstreams agree")
        for vote in votes:
            if vote.digest != winner.digest and await self._is_wrong(vote, winner):
                self._blame(vote.upstream, reply=vote.digest, agreed=winner.digest)

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
            return ReplyVote(upstream, digest_of_error(exc.error), error=exc.error)
        if len(result) > MOST_COMPARED:
            return None
        digest = digest_of(result) if len(result) <= SMALL else await _off_loop(digest_of, result)
        return ReplyVote(upstream, digest, result=result)

    async def _is_wrong(self, vote: ReplyVote, winner: ReplyVote) -> bool:
        """Whether the reply is a contradiction that counts: results of a method whose replies the chain determines. The
        upstream is asked again, because a block may have been replaced meanwhile."""
        prover = self._policy.family.prover
        if prover is None or not prover.covers(self._method) or vote.error or winner.error:
            return False
        # Upstreams may differ about blocks that are not final, about tags, and about the data that they keep.
        if not self._is_final() or b"null" in (vote.result, winner.result):
            return False
        again = await self._vote(vote.upstream)
        return again is not None and again.digest == vote.digest

    def _is_final(self) -> bool:
        """Whether the call is about a block, or blocks, that cannot be replaced."""
        policy, heads = self._policy, self._route.heads
        ref = policy.family.block_ref(policy.method, self._params)
        if policy.by_range:
            return not ref.moves and policy.last_block(self._params, heads.tip) <= heads.final
        return ref.kind == "number" and 0 <= ref.number <= heads.final

    def _at_common_head(self, chosen: Sequence[Upstream]) -> bytes:
        """The params with the newest block that all of these upstreams have, in place of `latest`."""
        at_block, head = self._policy.family.at_block, min(each.health.head for each in chosen)
        self.read_at(head)
        return self._params if at_block is None or not head else at_block(self._policy.method, self._params, head)

    # Proof

    async def proven(self, prover: Prover) -> bytes:
        params, failures = msgspec.json.decode(self._params), []
        # A call that no upstream can prove says nothing about them: they are blamed only if another one proves it.
        suspects: list[tuple[Upstream, str]] = []
        for upstream in self.upstreams():
            source = UpstreamSource(self, upstream)
            try:
                result = await prover.prove(self._method, params, source)
                for suspect, reason in suspects:
                    self._blame(suspect, reason=reason)
                return result
            except NeverProvable as exc:
                raise _refused(self._method, self.how, str(exc)) from None
            except Unprovable as exc:
                failures.append(str(exc))
            except Refuted as exc:
                failures.append(str(exc))
                if source.is_complete and await self._is_refuted_again(prover, source, params):
                    suspects.append((upstream, str(exc)))
            except RpcError as exc:
                failures.append(f"an upstream does not have what the proof needs: {exc.error.decode()}")
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

    def _blame(self, upstream: Upstream, **found: str) -> None:
        log.warning("upstream contradicted", extra={"upstream": upstream.label, "method": self._method, **found})
        telemetry.contradictions_total.labels(upstream.label).inc()
        shown = ", ".join(f"{name} {text}" for name, text in found.items())
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
        # One that claims no head would make any old state the latest.
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
        asked = call_upstream(to, policy, params, upstream=upstream, client=self._client, trace=self.trace)
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
        return msgspec.json.decode(await self._ask(upstream, policy, msgspec.json.encode(params)))


class UpstreamSource:
    """One upstream, as a proof asks it. `is_complete`: the upstream gave every reply of the proof itself."""

    def __init__(self, call: VerifiedCall, upstream: Upstream) -> None:
        self._call = call
        self._upstream = upstream
        self._others = [each for each in call.confirming() if each is not upstream][: MOST_CONFIRMING - 1]
        self.head = min(each.health.head for each in (upstream, *self._others[: PROOF_QUORUM - 1]))
        self.is_complete = True
        call.read_at(self.head)

    def __repr__(self) -> str:
        return f"<UpstreamSource {self._upstream.label}>"

    async def ask(self, method: str, params: Sequence[Any]) -> Any:
        return await self._call.ask(self._upstream, method, params)

    async def ask_or_none(self, method: str, params: Sequence[Any]) -> Any:
        if not self._upstream.health.may_serve(method):
            return None
        try:
            return await self.ask(method, params)
        except RpcError:
            return None

    async def confirm(self, ref: str, block_hash: str) -> bool:
        """Whether another upstream has this block too. The only upstream of a network confirms itself. One whose others cannot
        be asked does not: it may have claimed a head that they do not have."""
        self.is_complete = True
        is_answered = self._call.has_one_upstream
        for other in self._others:
            try:
                found = await self._call.ask(other, CONFIRMS, [ref, False])
            except (RpcError, Fault, *UNREADABLE):
                continue
            is_answered = True
            if isinstance(found, dict) and str(found.get("hash")).lower() == block_hash.lower():
                return True
        # Which of them is wrong is not known.
        self.is_complete = self._call.has_one_upstream
        if not is_answered:
            raise Unprovable("no other upstream can confirm the block at the moment")
        return self._call.has_one_upstream

    async def off_loop(self, check: Callable[..., T], *values: Any) -> T:
        return await _off_loop(check, *values)


async def _answer_agreed(answer: VerifiedAnswer, votes: Sequence[ReplyVote]) -> None:
    if votes[0].error:
        answer.error(agreed_error([vote.error for vote in votes]))
        return
    results = [vote.result for vote in votes]
    answer.result(agreed_result(results) if len(results[0]) <= SMALL else await _off_loop(agreed_result, results))


def _refused(method: str, how: Verification, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{method} cannot be verified by {how}: {reason}")


async def _off_loop(check: Callable[..., T], *values: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_checks, check, *values)
