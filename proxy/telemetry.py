"""Every metric, and structured logs with redaction.

Metrics are prometheus-client's, in its multi-process mode: each worker writes its own files, the supervisor adds them up
when it is scraped. Labels come from closed sets. Logs are one JSON object a line, written by a thread of their own
through a bounded queue: a full disk or a stopped reader drops lines, never blocks a request.
"""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import queue
import re
import sys
import time
from collections import Counter as Counter_
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, multiprocess, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from proxy.core.usage import LATENCY_S as LATENCY_S
from proxy.core.usage import Tally as Tally

requests_total = Counter("penstock_requests_total", "Answered requests", ["operation", "status"])
request_seconds = Histogram("penstock_request_seconds", "Time to answer", ["operation"], buckets=LATENCY_S)
connections_open = Gauge("penstock_connections_open", "Open client connections", multiprocess_mode="livesum")
connections_refused_total = Counter("penstock_connections_refused_total", "Connections refused at the door", ["reason"])
sockets_open = Gauge("penstock_sockets_open", "Open WebSockets", multiprocess_mode="livesum")
sockets_closed_total = Counter("penstock_sockets_closed_total", "WebSockets closed, by their close code", ["code"])
subscriptions_open = Gauge("penstock_subscriptions_open", "Open subscriptions", ["kind"], multiprocess_mode="livesum")
socket_events_total = Counter("penstock_socket_events_total", "Events of subscriptions", ["kind", "outcome"])
feed_blocks_stuck_total = Counter(
    "penstock_feed_blocks_stuck_total", "Blocks whose logs no upstream gave in many attempts", ["network"]
)
keys_loaded = Gauge("penstock_keys_loaded", "Keys in memory", multiprocess_mode="livemax")
database_up = Gauge("penstock_database_up", "Whether Postgres answers", multiprocess_mode="livemin")
follower_leads = Gauge(
    "penstock_follower_leads", "Whether this follower writes the network", ["network"], multiprocess_mode="livemax"
)
follower_head = Gauge(
    "penstock_follower_head", "The newest block that the follower knows of", ["network"], multiprocess_mode="livemax"
)
follower_block = Gauge(
    "penstock_follower_block", "The last block that is written", ["network"], multiprocess_mode="livemax"
)
follower_stopped = Gauge(
    "penstock_follower_stopped",
    "Whether the network's record cannot go on: its chain was replaced",
    ["network"],
    multiprocess_mode="livemax",
)
followed_blocks_total = Counter("penstock_followed_blocks_total", "Blocks written", ["network"])
undone_blocks_total = Counter("penstock_undone_blocks_total", "Blocks taken back that the chain dropped", ["network"])
reorgs_total = Counter("penstock_reorgs_total", "Times that a chain dropped blocks", ["network"])
events_total = Counter("penstock_events_total", "Events made for webhooks", ["network", "type"])
delivery_attempts_total = Counter(
    "penstock_delivery_attempts_total", "Attempts to deliver an event, by their end", ["outcome"]
)
deliveries_under_way = Gauge("penstock_deliveries_under_way", "Deliveries under way", multiprocess_mode="livesum")
webhooks_stopped_total = Counter(
    "penstock_webhooks_stopped_total", "Webhooks paused or disabled by failures", ["cause"]
)
transfers_total = Counter("penstock_transfers_total", "Transfers of tokens written", ["network"])
odd_logs_total = Counter("penstock_odd_logs_total", "Logs of tokens that no token standard explains", ["network"])
sponsorships_total = Counter(
    "penstock_sponsorships_total", "Operations that were to be sponsored, by what became of it", ["network", "outcome"]
)
unknown_payments_total = Counter(
    "penstock_unknown_payments_total", "Operations that our paymasters paid and no ledger knows", ["network"]
)
log_lines_dropped_total = Counter("penstock_log_lines_dropped_total", "Log lines that nobody read in time")


class Tallies:
    """All tallies of a process, written to a file that the supervisor adds up when it is scraped."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, str], Tally] = {}

    def __repr__(self) -> str:
        return f"<Tallies {len(self._all)}>"

    def of(self, network: str, method: str) -> Tally:
        return self._all.setdefault((network, method), Tally(network, method))

    def write(self, path: Path, upstreams: Sequence[tuple[str, str, int, int]] = ()) -> None:
        """Whole or not at all: a scrape never sees half a file."""
        rows = [
            [*t.labels, t.results, t.errors, t.faults, t.hits, t.joins, t.units, t.seconds, t.buckets]
            for t in self._all.values()
            if any(t.buckets)
        ]
        part = path.with_suffix(".part")
        part.write_bytes(orjson.dumps({"calls": rows, "upstreams": upstreams}))
        part.replace(path)


class CallCollector(Collector):
    """The calls of all workers, those that died included: their files stay."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        calls = CounterMetricFamily("penstock_calls", "JSON-RPC calls", labels=["network", "method", "outcome"])
        cache = CounterMetricFamily("penstock_cache", "Calls answered without an upstream", labels=["network", "how"])
        units = CounterMetricFamily("penstock_call_units", "Compute units of calls", labels=["network", "method"])
        seconds = HistogramMetricFamily("penstock_call_seconds", "Time to answer a call", labels=["network", "method"])
        upstreams = CounterMetricFamily("penstock_upstream_calls", "Calls to upstreams", labels=["upstream", "outcome"])
        for (network, method), sums in self._calls().items():
            for outcome, count in zip(("result", "error", "fault"), sums[:3], strict=True):
                calls.add_metric([network, method, outcome], count)
            cache.add_metric([network, "hit"], sums[3])
            cache.add_metric([network, "join"], sums[4])
            units.add_metric([network, method], sums[5])
            seconds.add_metric([network, method], _cumulative(sums[7]), sums[6])
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
        found: dict[tuple[str, str], list[Any]] = {}
        for data in self._files():
            for network, method, *numbers, buckets in data["calls"]:
                sums = found.setdefault((network, method), [0] * len(numbers) + [[0] * len(buckets)])
                for place, number in enumerate(numbers):
                    sums[place] += number
                sums[-1] = [have + more for have, more in zip(sums[-1], buckets, strict=True)]
        return found

    def _upstreams(self) -> Counter_[tuple[str, str]]:
        found: Counter_[tuple[str, str]] = Counter_()
        for data in self._files():
            for _network, label, good, bad in data["upstreams"]:
                found[label, "answered"] += good
                found[label, "failed"] += bad
        return found


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    total = 0
    out = []
    for edge, count in zip((*map(str, LATENCY_S), "+Inf"), buckets, strict=True):
        total += count
        out.append((edge, float(total)))
    return out


def _merged(family: CounterMetricFamily) -> CounterMetricFamily:
    """Add up samples of the same labels: a network has many methods."""
    sums: dict[tuple[str, ...], float] = {}
    for sample in family.samples:
        sums[tuple(sample.labels.values())] = sums.get(tuple(sample.labels.values()), 0.0) + sample.value
    merged = CounterMetricFamily(family.name, family.documentation, labels=list(family._labelnames))
    for labels, value in sums.items():
        merged.add_metric(list(labels), value)
    return merged


# A key may stand in a path, a query or a message; only its prefix is ever written.
_PREFIXES = "svc_(?:live|test)_|whsec_|adm_"
_KEY = re.compile(rf"({_PREFIXES})[0-9A-Za-z+/=_-]+")
# A request's id that is echoed and written: whoever sends a key as one gets another.
REQUEST_ID = f"(?!.*(?:{_PREFIXES}))[A-Za-z0-9_-]{{1,64}}"
# Of an address only scheme and host are written: credentials stand before the host, and behind it upstreams have their
# keys. An address ends where the JSON string around it does, so that what is left is still JSON.
_ADDRESS = re.compile(r'(?<=://)(?:[^\s"\\]|\\["\\])+')
_AFTER_HOST = re.compile(r"[/?#]")
# Lines that wait to be written. Past that they are dropped and counted.
QUEUE = 10_000
# How often access lines go out.
ACCESS_FLUSH_S = 0.2
# Attributes of a LogRecord that are the machinery's, not the event's.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def redact(text: str) -> str:
    """A line of JSON without what is secret in it."""
    return _KEY.sub(r"\1[redacted]", _ADDRESS.sub(_redacted_address, text))


def _redacted_address(found: re.Match[str]) -> str:
    authority, *rest = _AFTER_HOST.split(found[0], maxsplit=1)
    credentials, _, host = authority.rpartition("@")
    if any("@" in part for part in rest):
        return "[redacted]"  # a password with a slash in it, perhaps
    return f"{'[redacted]@' if credentials else ''}{host}{'/[redacted]' if any(rest) else ''}"


class JsonLines(logging.Formatter):
    """One record, one line, one JSON object; nothing secret in it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
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
    except TypeError:  # a lone surrogate, an integer beyond 64 bits: nothing that is said to us may silence the log
        return orjson.dumps({name: _plain(value) for name, value in line.items()}).decode()


def _plain(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


class _Dropping(logging.handlers.QueueHandler):
    """Hands records to the writing thread; drops what does not fit."""

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            log_lines_dropped_total.inc()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def start_logging(level: str, stream: TextIO = sys.stderr) -> logging.handlers.QueueListener:
    """Send all logs through the queue; the caller stops the listener at the end."""
    lines: queue.Queue[Any] = queue.Queue(QUEUE)
    writer = logging.StreamHandler(stream)
    writer.setFormatter(JsonLines())
    listener = logging.handlers.QueueListener(lines, writer)
    root = logging.getLogger()
    root.handlers[:] = [_Dropping(lines)]
    root.setLevel(level.upper())
    # The library's own words about clients that vanish are nothing to act on.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    listener.start()
    return listener


class AccessLines:
    """Lines that are written ready-made, a few times a second and by a thread: what logging costs is too much per call."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._lines: list[bytes] = []

    def __repr__(self) -> str:
        return f"<AccessLines {len(self._lines)} to write>"

    def add(self, line: bytes) -> None:
        """Past the bound lines are dropped: a full disk must not fill the memory."""
        if len(self._lines) < QUEUE:
            self._lines.append(line)
        else:
            log_lines_dropped_total.inc()

    async def run(self) -> None:
        """A supervised loop."""
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


class Scrape:
    """What the supervisor answers to Prometheus: the files of all workers added up, and its own counts."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._registry = CollectorRegistry()
        MultiProcessCollector(self._registry, path=directory)  # type: ignore[no-untyped-call]
        self._registry.register(CallCollector(Path(directory)))
        # Not a worker's: it is kept in this process alone.
        self._restarts = Counter("penstock_worker_restarts", "Workers replaced", registry=self._registry)

    def serve(self, host: str, port: int) -> int:
        """Answer from a thread of this process; the port that it got."""
        server, _ = start_http_server(port, host, self._registry)
        self._server = server
        return int(server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def worker_ended(self, pid: int) -> None:
        """A dead worker's gauges must not be counted on."""
        multiprocess.mark_process_dead(pid, path=self._directory)  # type: ignore[no-untyped-call]
        self._restarts.inc()
