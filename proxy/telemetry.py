"""All metrics, and structured logs with redaction.

Metrics use the multi-process mode of prometheus-client: each worker writes its own files, and the supervisor adds them up
on each scrape. Labels come from closed sets. Logs are one JSON object per line, written by a separate thread through a
bounded queue: if the disk is full or the reader stops, lines are dropped, and no request ever waits.
"""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import queue
import re
import sys
from collections import Counter as Counter_
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, multiprocess, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from proxy.core.exemplars import Exemplars
from proxy.core.iso_time import iso_millis_of_unix
from proxy.core.latency_histogram import bucket_of
from proxy.core.usage import LATENCY_S as LATENCY_S
from proxy.core.usage import Tally as Tally

# How the values of several processes are combined.
Combined: TypeAlias = Literal["livesum", "livemax", "livemin"]


def _gauge(combined: Combined, name: str, about: str, *labels: str) -> Gauge:
    return Gauge(name, about, labels, multiprocess_mode=combined)


requests_total = Counter("penstock_requests_total", "Answered requests", ["operation", "status"])
request_seconds = Histogram("penstock_request_seconds", "Time to answer", ["operation"], buckets=LATENCY_S)
rate_wait_seconds = Histogram(
    "penstock_rate_wait_seconds",
    "Time that items of batches, and parts of larger work, waited for their own account's rate limit",
    ["kind"],
    buckets=LATENCY_S,
)
connections_open = _gauge("livesum", "penstock_connections_open", "Open client connections")
connections_refused_total = Counter(
    "penstock_connections_refused_total", "Connections refused by the connection limiter", ["reason"]
)
tls_handshake_failures_total = Counter(
    "penstock_tls_handshake_failures_total",
    "TLS connections of clients that failed or left before the end of the handshake",
)
held_bytes = _gauge("livesum", "penstock_held_bytes", "Bytes held for clients, by kind", "kind")
sockets_open = _gauge("livesum", "penstock_sockets_open", "Open WebSockets")
verifications_total = Counter("penstock_verifications_total", "Verified calls", ["kind", "outcome"])
contradictions_total = Counter(
    "penstock_contradictions_total", "Replies of an upstream that were proven wrong", ["upstream"]
)
split_votes_total = Counter(
    "penstock_split_votes_total",
    "Calls on whose result, which the chain determines, operators disagree without a quorum",
    ["network"],
)
contradictions_dropped_total = Counter(
    "penstock_contradictions_dropped_total", "Contradicted replies that were not kept, because there were too many"
)
sockets_closed_total = Counter("penstock_sockets_closed_total", "WebSockets closed, by close code", ["code"])
subscriptions_open = _gauge("livesum", "penstock_subscriptions_open", "Open subscriptions", "kind")
socket_events_total = Counter("penstock_socket_events_total", "Subscription events", ["kind", "outcome"])
feed_blocks_stuck_total = Counter(
    "penstock_feed_blocks_stuck_total", "Blocks whose logs no upstream returned after many attempts", ["network"]
)
keys_loaded = _gauge("livemax", "penstock_keys_loaded", "Keys in memory")
database_refusals_total = Counter(
    "penstock_database_refusals_total", "Uses of the database that failed or were refused, by reason", ["reason"]
)
process_info = _gauge(
    "livesum", "penstock_process_info", "Running processes of this host, by role and version", "role", "version"
)
valkey_up = _gauge("livemin", "penstock_valkey_up", "Whether the Valkey for limits answers all workers of this host")
valkey_round_trip_seconds = _gauge(
    "livemax", "penstock_valkey_round_trip_seconds", "Recent average time of a reply of the Valkey for limits"
)
fleet_hosts = _gauge("livemax", "penstock_fleet_hosts", "Hosts that share the limits")
leases_held = _gauge("livesum", "penstock_leases", "Limits of which workers of this host lease tokens")
lease_asks_total = Counter("penstock_lease_asks_total", "Commands to Valkey for leases and reports of spent tokens")
replica_age = _gauge(
    "livemax", "penstock_database_replica_age_seconds", "How old the data of the read replica is at most"
)
replica_reads_total = Counter(
    "penstock_database_replica_reads_total", "Reads that a replica may answer, by the server that did", ["server"]
)
follower_leads = _gauge("livemax", "penstock_follower_leads", "Whether this follower indexes the network", "network")
follower_head = _gauge("livemax", "penstock_follower_head", "The newest block that the follower has seen", "network")
follower_block = _gauge("livemax", "penstock_follower_block", "The last block that the follower has indexed", "network")
follower_stopped = _gauge(
    "livemax",
    "penstock_follower_stopped",
    "Whether indexing of the network has stopped because its chain was replaced",
    "network",
)
follower_stuck = _gauge(
    "livemax",
    "penstock_follower_stuck",
    "Whether the follower makes no progress although it goes on trying",
    "network",
)
followed_blocks_total = Counter("penstock_followed_blocks_total", "Blocks indexed", ["network"])
undone_blocks_total = Counter("penstock_undone_blocks_total", "Indexed blocks removed by reorganisations", ["network"])
reorgs_total = Counter("penstock_reorgs_total", "Reorganisations", ["network"])
events_total = Counter("penstock_events_total", "Webhook events created", ["network", "type"])
events_dropped_total = Counter(
    "penstock_events_dropped_total",
    "Webhook events above the account's daily limit, which were not stored",
    ["network"],
)
delivery_attempts_total = Counter(
    "penstock_delivery_attempts_total", "Webhook delivery attempts, by outcome", ["outcome"]
)
deliveries_under_way = _gauge("livesum", "penstock_deliveries_under_way", "Webhook deliveries in progress")
webhooks_stopped_total = Counter(
    "penstock_webhooks_stopped_total", "Webhooks paused or disabled after failed deliveries", ["cause"]
)
transfers_total = Counter("penstock_transfers_total", "Token transfers indexed", ["network"])
odd_logs_total = Counter("penstock_odd_logs_total", "Token logs that match no token standard", ["network"])
sponsorships_total = Counter("penstock_sponsorships_total", "Sponsorship requests, by outcome", ["network", "outcome"])
unknown_payments_total = Counter(
    "penstock_unknown_payments_total", "Operations that a paymaster paid and that are not in the ledger", ["network"]
)
# Each worker has its own view of an upstream. The worst of them is shown.
upstream_up = _gauge("livemin", "penstock_upstream_up", "Whether the upstream takes calls", "upstream")
upstream_breaker_open = _gauge(
    "livemax", "penstock_upstream_breaker_open", "Whether calls avoid the upstream because others failed", "upstream"
)
upstream_blocks_behind = _gauge(
    "livemax",
    "penstock_upstream_blocks_behind",
    "Blocks between the head of the upstream and of its network",
    "upstream",
)
upstream_latency_seconds = _gauge(
    "livemax", "penstock_upstream_latency_seconds", "Average time of the last twenty or so replies", "upstream"
)
upstream_calls_in_flight = _gauge(
    "livesum", "penstock_upstream_calls_in_flight", "Calls that wait for a reply", "upstream"
)
upstream_credits_total = Counter(
    "penstock_upstream_credits_total", "Credits that the provider of the upstream bills", ["upstream", "method"]
)
upstream_cost_total = Counter(
    "penstock_upstream_cost_usd_total", "The cost of these credits in US dollars", ["upstream"]
)
upstream_exclusions_total = Counter(
    "penstock_upstream_exclusions_total",
    "Times that the upstream began to exceed a limit of a routing rule, also of one that is only evaluated",
    ["upstream", "rule"],
)
shadow_reads_total = Counter(
    "penstock_shadow_reads_total",
    "Reads that an upstream on trial got too, by how its reply compares",
    ["upstream", "outcome"],
)
upstream_budget_credits = _gauge(
    "livemax", "penstock_upstream_budget_credits", "Credits of the budget of the upstream", "upstream"
)
upstream_budget_left_credits = _gauge(
    "livemin", "penstock_upstream_budget_left_credits", "Credits of the budget that are left in its period", "upstream"
)
upstream_budget_end = _gauge(
    "livemax",
    "penstock_upstream_budget_end_timestamp_seconds",
    "When the budget of the upstream runs out at the rate of its period so far; 0 if its period ends before",
    "upstream",
)
request_records_dropped_total = Counter(
    "penstock_request_records_dropped_total", "Records of requests dropped because the memory for them was full"
)
loop_failures_total = Counter(
    "penstock_loop_failures_total", "Unexpected errors of background loops, which then go on", ["loop"]
)
rows_set_aside_total = Counter(
    "penstock_rows_set_aside_total", "Rows that background loops skipped: their values cannot be processed", ["kind"]
)
log_lines_dropped_total = Counter("penstock_log_lines_dropped_total", "Log lines dropped because the queue was full")
# The last gauge: a forked process sets all gauges to 0 in the order of their definition, and then this one to 1.
database_up = _gauge("livemin", "penstock_database_up", "Whether Postgres answers", "database")


def start_metrics() -> None:
    """Begin the metrics of a process. `database_up` is the least of all processes: one that has just started must not
    report an outage before its first probe."""
    database_up.labels("main").set(1)


exemplars = Exemplars()


class Tallies:
    """All call counters of a process, written to a file that the supervisor adds up on each scrape."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, str], Tally] = {}
        # The file that was last written, and its content.
        self._written: tuple[Path, bytes] | None = None

    def __repr__(self) -> str:
        return f"<Tallies {len(self._all)}>"

    def of(self, network: str, method: str) -> Tally:
        return self._all.setdefault((network, method), Tally(network, method))

    def write(self, path: Path, upstreams: Sequence[tuple[str, str, int, int, int]] = ()) -> None:
        """Write the file atomically, so that a scrape never reads half of it. A process without calls writes nothing: renaming
        a file can take milliseconds."""
        rows = [
            [*t.labels, t.results, t.errors, t.faults, t.hits, t.joins, t.units, t.seconds, t.buckets]
            for t in self._all.values()
            if any(t.buckets)
        ]
        content = orjson.dumps({"calls": rows, "upstreams": upstreams, "exemplars": exemplars.rows()})
        if (path, content) == self._written:
            return
        part = path.with_suffix(".part")
        part.write_bytes(content)
        part.replace(path)
        self._written = path, content


class CallCollector(Collector):
    """Collects the calls of all workers, including ended ones, whose files stay."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        calls = CounterMetricFamily("penstock_calls", "JSON-RPC calls", labels=["network", "method", "outcome"])
        cache = CounterMetricFamily("penstock_cache", "Calls answered without an upstream", labels=["network", "how"])
        units = CounterMetricFamily("penstock_call_units", "Compute units of calls", labels=["network", "method"])
        seconds = HistogramMetricFamily("penstock_call_seconds", "Time to answer a call", labels=["network", "method"])
        upstreams = CounterMetricFamily("penstock_upstream_calls", "Calls to upstreams", labels=["upstream", "outcome"])
        traces = self._exemplars()
        for (network, method), sums in self._calls().items():
            for outcome, count in zip(("result", "error", "fault"), sums[:3], strict=True):
                calls.add_metric([network, method, outcome], count)
            cache.add_metric([network, "hit"], sums[3])
            cache.add_metric([network, "join"], sums[4])
            units.add_metric([network, method], sums[5])
            buckets = _with_exemplar(_cumulative(sums[7]), traces.get((network, method)))
            seconds.add_metric([network, method], buckets, sums[6])
        for (label, outcome), count in self._upstreams().items():
            upstreams.add_metric([label, outcome], count)
        yield from (calls, _merged(cache), units, seconds, upstreams)

    def _files(self) -> Iterator[Any]:
        for path in self._directory.glob("calls-*.json"):
            try:
                yield orjson.loads(path.read_bytes())
            except (OSError, orjson.JSONDecodeError):
                continue

    def _calls(self) -> dict[tuple[str, str], list[Any]]:
        calls: dict[tuple[str, str], list[Any]] = {}
        for data in self._files():
            for network, method, *numbers, buckets in data["calls"]:
                sums = calls.setdefault((network, method), [0] * len(numbers) + [[0] * len(buckets)])
                for index, number in enumerate(numbers):
                    sums[index] += number
                sums[-1] = [have + more for have, more in zip(sums[-1], buckets, strict=True)]
        return calls

    def _exemplars(self) -> dict[tuple[str, str], Exemplar]:
        """The newest of all workers, for each kind of call."""
        exemplars: dict[tuple[str, str], Exemplar] = {}
        for data in self._files():
            for network, method, trace_id, seconds, at in data["exemplars"]:
                known = exemplars.get((network, method))
                if known is None or (known.timestamp or 0.0) < at:
                    exemplars[network, method] = Exemplar({"trace_id": trace_id}, seconds, at)
        return exemplars

    def _upstreams(self) -> Counter_[tuple[str, str]]:
        totals: Counter_[tuple[str, str]] = Counter_()
        for data in self._files():
            for _network, label, *counts in data["upstreams"]:
                for outcome, count in zip(("answered", "failed", "refused"), counts, strict=True):
                    totals[label, outcome] += count
        return totals


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    total = 0
    out = []
    for edge, count in zip((*map(str, LATENCY_S), "+Inf"), buckets, strict=True):
        total += count
        out.append((edge, float(total)))
    return out


def _with_exemplar(buckets: list[tuple[str, float]], exemplar: Exemplar | None) -> list[Any]:
    """Add the exemplar to the bucket that counts its call."""
    if exemplar is None:
        return list(buckets)
    place = bucket_of(exemplar.value)
    return [(*bucket, exemplar) if at == place else bucket for at, bucket in enumerate(buckets)]


def _merged(family: CounterMetricFamily) -> CounterMetricFamily:
    """Add up samples with equal labels: there is one sample per method of a network."""
    sums: dict[tuple[str, ...], float] = {}
    for sample in family.samples:
        sums[tuple(sample.labels.values())] = sums.get(tuple(sample.labels.values()), 0.0) + sample.value
    merged = CounterMetricFamily(family.name, family.documentation, labels=list(family._labelnames))
    for labels, value in sums.items():
        merged.add_metric(list(labels), value)
    return merged


# Keys can appear in paths, queries and messages. Only their prefix is logged.
_PREFIXES = "svc_(?:live|test)_|whsec_|adm_"
# In a path, the underscores and letters of a key may be percent-encoded, more than once.
_KEY = re.compile(rf"({_PREFIXES.replace('_', '(?:_|%(?:25)*5[Ff])')})[0-9A-Za-z+/=_%-]+")
# Request ids of clients that are echoed and logged. An id that contains a key, or looks like one of ours or of a webhook event,
# is replaced by a generated one.
REQUEST_ID = f"(?!req_|evt_)(?!.*(?:{_PREFIXES}))[A-Za-z0-9_-]{{1,64}}"
# URLs are logged as scheme and host only: credentials precede the host, and upstream URLs have keys in the path. A match ends
# with the surrounding JSON string, so that the line stays valid JSON.
_ADDRESS = re.compile(r'(?<=://)(?:[^\s"\\]|\\["\\])+')
_AFTER_HOST = re.compile(r"[/?#]")
# The most queued lines. More are dropped and counted.
QUEUE = 10_000
# How often access lines are written.
ACCESS_FLUSH_S = 0.2
# Standard attributes of a LogRecord; all others come from `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def redact(text: str) -> str:
    """Remove keys, credentials and URL paths from a line of JSON."""
    return _KEY.sub(r"\1[redacted]", _ADDRESS.sub(_redacted_address, text))


def _redacted_address(match: re.Match[str]) -> str:
    authority, *rest = _AFTER_HOST.split(match[0], maxsplit=1)
    credentials, _, host = authority.rpartition("@")
    if any("@" in part for part in rest):
        return "[redacted]"  # possibly a password that contains a slash
    return f"{'[redacted]@' if credentials else ''}{host}{'/[redacted]' if any(rest) else ''}"


class JsonLines(logging.Formatter):
    """Formats a record as one line with a JSON object, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": iso_millis_of_unix(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((name, value) for name, value in vars(record).items() if name not in _OWN)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return redact(_encoded(line))


def _encoded(line: dict[str, Any]) -> str:
    try:
        return orjson.dumps(line, default=str).decode()
    except TypeError:  # a lone surrogate or an integer over 64 bits: client input must not suppress a log line
        return orjson.dumps({name: _plain(value) for name, value in line.items()}).decode()


def _plain(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


class _Dropping(logging.handlers.QueueHandler):
    """Passes records to the writing thread and drops them if the queue is full."""

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            log_lines_dropped_total.inc()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def start_logging(level: str, stream: TextIO = sys.stderr) -> logging.handlers.QueueListener:
    """Send all logs through the queue. The caller stops the returned listener at exit."""
    lines: queue.Queue[Any] = queue.Queue(QUEUE)
    writer = logging.StreamHandler(stream)
    writer.setFormatter(JsonLines())
    listener = logging.handlers.QueueListener(lines, writer)
    root = logging.getLogger()
    root.handlers[:] = [_Dropping(lines)]
    root.setLevel(level.upper())
    # asyncio's warnings about lost client connections need no action.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    listener.start()
    return listener


class AccessLines:
    """Access lines, formatted by the caller and written by a thread a few times per second.

    The logging module costs too much per call for this.
    """

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._lines: list[bytes] = []

    def __repr__(self) -> str:
        return f"<AccessLines {len(self._lines)} to write>"

    def add(self, line: bytes) -> None:
        """Queue a line, or drop it if the queue is full: a full disk must not fill the memory."""
        if len(self._lines) < QUEUE:
            self._lines.append(line)
        else:
            log_lines_dropped_total.inc()

    async def run(self) -> None:
        """Write queued lines. A supervised loop."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(ACCESS_FLUSH_S)
            if self._lines:
                await loop.run_in_executor(None, self.flush)

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        with suppress(OSError):
            self._stream.buffer.write(b"".join(lines))
            self._stream.buffer.flush()


class FileCollector(MultiProcessCollector):
    """Collects the files of all processes. A process killed at its first moment leaves an empty one, which is left out."""

    def collect(self) -> Iterable[Metric]:
        return self.merge(map(str, filter(_has_bytes, Path(self._path).glob("*.db"))))  # type: ignore[no-untyped-call, no-any-return]


def _has_bytes(path: Path) -> bool:
    with suppress(FileNotFoundError):  # the gauges of an ended process are removed at any time
        return path.stat().st_size > 0
    return False


class Scrape:
    """The supervisor's Prometheus endpoint: the summed files of all workers, and its own counters."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._registry = CollectorRegistry()
        FileCollector(self._registry, path=self._directory)  # type: ignore[no-untyped-call]
        self._registry.register(CallCollector(directory))
        # Metrics of the supervisor, not in the workers' files.
        self._restarts = Counter("penstock_worker_restarts", "Worker processes replaced", registry=self._registry)
        self._hangs = Counter(
            "penstock_worker_hangs", "Worker processes killed because they did not respond", registry=self._registry
        )

    def serve(self, host: str, port: int) -> int:
        """Serve from a thread, and return the port."""
        server, _ = start_http_server(port, host, self._registry)
        self._server = server
        return int(server.server_port)

    def families(self) -> Iterable[Metric]:
        return self._registry.collect()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def worker_ended(self, pid: int) -> None:
        """Remove the gauges of an ended process from the sums."""
        multiprocess.mark_process_dead(pid, path=self._directory)  # type: ignore[no-untyped-call]

    def worker_replaced(self) -> None:
        self._restarts.inc()

    def worker_hung(self) -> None:
        self._hangs.inc()
