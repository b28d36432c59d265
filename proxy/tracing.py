"""Traces: what a sampled request did, as spans that OpenTelemetry's SDK sends to a collector with OTLP.

Tracing is off unless `tracing.endpoint` is set, and the SDK (the extra `trace`) is imported only then. A request is sampled at
its head: by the `traceparent` header (W3C Trace Context) if it has one, otherwise by chance. A request that is not sampled has
no span, which is None everywhere. JSON-RPC calls on the short path are sampled by their header alone: only a sampled one leaves
it, so the others cost nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from proxy import __version__
from proxy.core.directives import Directives
from proxy.settings import TracingSettings

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

Attributes = Mapping[str, str | int | float | bool]
# The span of the request or delivery that a task works on.
current_span: ContextVar[Span | None] = ContextVar("current_span", default=None)


class Span:
    """A span that is recorded. It ends with its `with` block, or by `end`."""

    __slots__ = ("_inner", "_tracer", "trace_id", "traceparent")

    def __init__(self, tracer: trace.Tracer, inner: trace.Span) -> None:
        context = inner.get_span_context()
        self._tracer = tracer
        self._inner = inner
        self.trace_id = f"{context.trace_id:032x}"
        # The header that makes another program's spans children of this one.
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-01"

    def __repr__(self) -> str:
        return f"<Span {self.traceparent}>"

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None) -> None:
        if exc is not None:
            self.fail(type(exc).__name__)
        self.end()

    def child(self, name: str, attributes: Attributes, *, calls_out: bool = False) -> Span:
        """Start a span below this one. `calls_out`: it waits for another program."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        kind = SpanKind.CLIENT if calls_out else SpanKind.INTERNAL
        context = set_span_in_context(self._inner)
        return Span(self._tracer, self._tracer.start_span(name, context=context, kind=kind, attributes=attributes))

    def set(self, attributes: Attributes) -> None:
        self._inner.set_attributes(attributes)

    def fail(self, reason: str) -> None:
        from opentelemetry.trace import StatusCode

        self._inner.set_status(StatusCode.ERROR, reason)

    def end(self) -> None:
        self._inner.end()


class Tracer:
    """Starts the traces of one process."""

    def __init__(self, provider: TracerProvider, *, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most`: traces that may start in a second. Clients choose to be sampled, and must not choose our load."""
        self._provider = provider
        self._tracer = provider.get_tracer("penstock", __version__)
        self._most = most
        self._clock = clock
        self._second = 0
        self._started = 0

    def __repr__(self) -> str:
        return f"<Tracer at most {self._most} per second>"

    def start(self, name: str, attributes: Attributes, *, traceparent: str = "", serves: bool = False) -> Span | None:
        """The first span of this process in a trace; None if it is not sampled. `serves`: it is a client's request."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        kind = SpanKind.SERVER if serves else SpanKind.PRODUCER
        inner = self._tracer.start_span(name, context=context, kind=kind, attributes=attributes)
        if not inner.get_span_context().trace_flags.sampled or not self._has_room():
            return None
        return Span(self._tracer, inner)

    def _has_room(self) -> bool:
        second = int(self._clock())
        if second != self._second:
            self._second, self._started = second, 0
        self._started += 1
        return self._started <= self._most

    def close(self) -> None:
        """Send what is left. Blocks while the collector answers."""
        self._provider.shutdown()


class CallTrace:
    """The attempts of one or more calls as spans: an `AttemptTrace`."""

    __slots__ = ("_attempts", "_parent")

    def __init__(self, parent: Span) -> None:
        self._parent = parent
        self._attempts: dict[tuple[bytes, str], Span] = {}

    def __repr__(self) -> str:
        return f"<CallTrace {len(self._attempts)} under way>"

    def began(self, call: bytes, upstream: str, method: str) -> bytes:
        attributes = {"rpc.system": "jsonrpc", "rpc.method": method, "penstock.upstream": upstream}
        span = self._parent.child("upstream attempt", attributes, calls_out=True)
        self._attempts[call, upstream] = span
        return b"traceparent: %b\r\n" % span.traceparent.encode()

    def failed(self, call: bytes, upstream: str, reason: str) -> None:
        if (span := self._attempts.get((call, upstream))) is not None:
            span.fail(reason)

    def ended(self, call: bytes, upstream: str) -> None:
        if (span := self._attempts.pop((call, upstream), None)) is not None:
            span.end()


def below(span: Span | None, name: str) -> AbstractContextManager[Span | None]:
    """A step of the request of this span, if there is one."""
    return nullcontext() if span is None else span.child(name, {})


def traced(directives: Directives | None, span: Span | None) -> Directives | None:
    """The directives of a call whose attempts become spans below this one."""
    if span is None:
        return directives
    return replace(directives or Directives(), trace=CallTrace(span))


def tracer_of(settings: TracingSettings, role: str) -> Tracer | None:
    """The tracer of a process, which starts a thread that exports its spans; None if tracing is off."""
    if not settings.endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    about: dict[str, Any] = {
        "service.name": "penstock",
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        "penstock.role": role,
    }
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(settings.ratio)), resource=Resource.create(about))
    exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=settings.timeout_s)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=settings.flush_s * 1000))
    return Tracer(provider, most=settings.max_per_second)
