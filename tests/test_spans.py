"""Spans with the SDK itself: how many traces may start, which are sampled, and what a connection to Postgres is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from proxy.core.directives import Directives
from proxy.settings import TracingSettings
from proxy.store.postgres.pool import Pool
from proxy.tracing import CallTrace, Span, Tracer, current_span, traced, tracer_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def tracer(ratio: float = 0.0, *, most: int = 100, now: float = 0.0) -> Tracer:
    return Tracer(TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio))), most=most, clock=lambda: now)


@pytest.fixture
def span() -> Iterator[Span]:
    found = tracer().start("request", {}, traceparent=f"{PARENT}01")
    assert found is not None
    token = current_span.set(found)
    yield found
    current_span.reset(token)


@pytest.mark.parametrize(
    ("ratio", "given", "is_traced"),
    [
        (0.0, "", False),
        (1.0, "", True),
        (0.0, f"{PARENT}01", True),
        (1.0, f"{PARENT}00", False),
        (1.0, "nonsense", True),
        (0.0, "nonsense-01", False),
    ],
)
def test_parent_decides_and_otherwise_chance(ratio: float, given: str, is_traced: bool) -> None:
    found = tracer(ratio).start("request", {}, traceparent=given)
    assert (found is not None) == is_traced


def test_traces_per_second_are_limited() -> None:
    clock = iter((0.1, 0.2, 0.3, 1.0)).__next__
    limited = Tracer(TracerProvider(), most=2, clock=clock)
    assert [limited.start("request", {}) is not None for _ in range(4)] == [True, True, False, True]


def test_tracing_is_off_without_an_endpoint() -> None:
    assert tracer_of(TracingSettings("", 1.0, 50, 5.0, 10.0), "gateway") is None
    assert traced(None, None) is None


def test_traced_call_is_served_like_any_other(span: Span) -> None:
    found = traced(None, span)
    assert found is not None
    assert isinstance(found.trace, CallTrace)
    plain = Directives()
    for name in ("reads_cache", "may_join", "steers", "retry", "timeout_ms"):
        assert getattr(found, name) == getattr(plain, name)


async def test_connection_is_named_after_the_trace_while_it_is_used(pool: Pool, span: Span) -> None:
    name = "select current_setting('application_name')"
    async with pool.connection() as connection:
        found = str(await connection.fetchval(name))
    assert found.startswith(f"00-{span.trace_id}-")
    assert found != span.traceparent
    current_span.set(None)
    async with pool.connection() as connection:
        assert await connection.fetchval(name) == "penstock"
