"""The meaning of an upstream's error or invalid reply, for the health of the upstream and for the caller."""

from __future__ import annotations

from proxy.core import upstream_errors
from proxy.core.upstream_errors import UpstreamError
from proxy.core.jsonrpc import UpstreamReply
from proxy.services.rpc.flights import Flight
from proxy.wire.http1 import ReplyHead
from proxy.wire.upstream import OUT_OF_STEP, Upstream, UpstreamConnection


def judge_error(flight: Flight, error: bytes, upstream: Upstream, now: float, took_s: float) -> UpstreamError:
    """Classify the error, and count it for or against the upstream."""
    policy, health = flight.policy, upstream.health
    verdict = upstream_errors.classify(error, policy.family.verdicts)
    flight.note(upstream, flight.last_began, now, f"error: {verdict.kind}")
    if verdict.wants_rest:
        health.rest(now, 1.0)
    elif verdict.blame:
        flight.suspect(upstream)
    elif verdict.kind == "unsupported":
        health.method_unsupported(policy.method.name, now, certainly=verdict.lacks_method)
    else:
        health.succeeded(took_s)
        flight.blame_suspects(now)
    return verdict


def count_invalid_reply(
    flight: Flight, connection: UpstreamConnection, head: ReplyHead, now: float, *, is_foreign: bool
) -> None:
    """Count a reply that is no JSON-RPC reply to our call against the upstream. `is_foreign`: it has another id."""
    upstream = connection.upstream
    if head.status < 400:
        # Only a foreign id means that replies are out of step. The next call on the connection may be another client's: it
        # must not fail because of a reply that this one provoked.
        if is_foreign or not connection.sinks:
            connection.fail(OUT_OF_STEP)
        upstream.health.failed(now, by_call=True)
    else:  # A gateway before the upstream sent an HTTP error: the next reply still belongs to the next call.
        flight.suspect(upstream)
        if not flight.policy.may_repeat:
            upstream.health.write_failed(now)


def error_for_caller(flight: Flight, reply: UpstreamReply, verdict: UpstreamError, upstream: Upstream) -> bytes:
    return upstream_errors.translate(
        bytes(reply.error),
        verdict,
        in_our_codes=flight.policy.normalises,
        private=upstream.private_words,
        is_named=bytes(reply.id) == flight.id,
    )
