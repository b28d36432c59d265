"""The meaning of an upstream's error, for the health of the upstream and for the caller."""

from __future__ import annotations

from proxy.core import dialect
from proxy.core.dialect import UpstreamError
from proxy.core.jsonrpc import UpstreamReply
from proxy.services.rpc.flights import Flight
from proxy.wire.upstream import Upstream


def judge_error(flight: Flight, error: bytes, upstream: Upstream, now: float, took_s: float) -> UpstreamError:
    """Classify the error, and count it for or against the upstream."""
    policy, health = flight.policy, upstream.health
    verdict = dialect.classify(error, policy.family.verdicts)
    flight.note(upstream, flight.last_began, now, f"error: {verdict.kind}")
    if verdict.wants_rest:
        health.rest(now, 1.0)
    elif verdict.blame:
        flight.suspect(upstream)
    elif verdict.kind == "unsupported":
        health.lacked(policy.method.name, now, certainly=verdict.lacks_method)
    else:
        health.succeeded(took_s)
        flight.blame_suspects(now)
    return verdict


def error_for_caller(flight: Flight, reply: UpstreamReply, verdict: UpstreamError, upstream: Upstream) -> bytes:
    return dialect.translate(
        bytes(reply.error),
        verdict,
        in_our_codes=flight.policy.normalises,
        private=upstream.private_words,
        is_named=bytes(reply.id) == flight.id,
    )
