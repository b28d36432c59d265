"""Every metric, and structured logs with redaction.

Metrics are prometheus-client's, in its multi-process mode: each worker writes its own files, the supervisor adds them up
when it is scraped. Labels come from closed sets. Logs are one JSON object a line, written by a thread of their own
through a bounded queue: a full disk or a stopped reader drops lines, never blocks a request.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import re
import sys
import time
from typing import Any, TextIO

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, multiprocess, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

LATENCY_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

requests_total = Counter("penstock_requests_total", "Answered requests", ["operation", "status"])
request_seconds = Histogram("penstock_request_seconds", "Time to answer", ["operation"], buckets=LATENCY_S)
refusals_total = Counter("penstock_refusals_total", "Requests refused at the gate", ["code"])
units_total = Counter("penstock_units_total", "Compute units charged", ["operation"])
connections_open = Gauge("penstock_connections_open", "Open client connections", multiprocess_mode="livesum")
connections_refused_total = Counter("penstock_connections_refused_total", "Connections refused at the door", ["reason"])
keys_loaded = Gauge("penstock_keys_loaded", "Keys in memory", multiprocess_mode="livemax")
database_up = Gauge("penstock_database_up", "Whether Postgres answers", multiprocess_mode="livemin")

# A key may stand in a path, a query or a message; only its prefix is ever written.
_SECRET = re.compile(r"(svc_(?:live|test)_|whsec_)[0-9A-Za-z+/=_-]+|(://)[^/@\s]+@")
# Lines that wait to be written. Past that they are dropped and counted.
QUEUE = 10_000
# Attributes of a LogRecord that are the machinery's, not the event's.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def redact(text: str) -> str:
    return _SECRET.sub(
        lambda found: f"{found.group(1) or found.group(2)}[redacted]{'@' if found.group(2) else ''}", text
    )


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
        return redact(orjson.dumps(line, default=str).decode())


class _Dropping(logging.handlers.QueueHandler):
    """Hands records to the writing thread; drops what does not fit."""

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            pass

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


class Scrape:
    """What the supervisor answers to Prometheus: the files of all workers added up, and its own counts."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._registry = CollectorRegistry()
        MultiProcessCollector(self._registry, path=directory)  # type: ignore[no-untyped-call]
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
