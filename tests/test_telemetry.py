"""Logs: one line is one JSON object without secrets, and logging never blocks. Metrics: the sum over all workers."""

from __future__ import annotations

import io
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from proxy import telemetry
from proxy.core import access
from proxy.telemetry import QUEUE, CallCollector, JsonLines, Scrape, Tallies, redact, start_logging

KEY = access.mint("live", bytes(range(32)))
TEST_KEY = access.mint("test", bytes(range(32)))
WEBHOOK = "whsec_ZXhhbXBsZS1zZWNyZXQtbm90LWEtcmVhbC1vbmU="
# Values that must not appear in any log line.
HIDDEN = (KEY[9:], TEST_KEY[9:], WEBHOOK[6:], "hunter2", "swordfish")

# In the manner of the Big List of Naughty Strings.
HOSTILE = [
    *(
        "",
        " ",
        "\t\r\n",
        "a\nb",
        "a\r\nb",
        '{"level":"error"}',
        '","level":"error',
        "\\",
        '\\"',
        "'",
        "%s %d %n",
        "{0}",
    ),
    *(
        "\0",
        "\x01\x02\x07\x08\x0b\x0c\x1b[31m\x7f",
        "\x80\x85\x9b",
        "\u2028\u2029",
        "\ufeff\u200b\u202e",
        "\ufffe\uffff",
    ),
    *("Ω≈ç√∫˜µ≤≥÷", "田中さん", "👾🏳️‍🌈", "Z̷̢͉a̵l̶g̴o̵", "ﷺ", "\ud800", "\udfff\ud800", "caf\udce9"),
    *(
        "<script>alert(1)</script>",
        "'; drop table keys; --",
        "${jndi:ldap://x}",
        "../../etc/passwd",
        "undefined",
        "NaN",
    ),
    *("x" * 100_000, "é" * 50_000),
]


def record(message: object = "event", *args: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("penstock.test").makeRecord(
        "penstock.test", logging.INFO, __file__, 1, message, args, None, extra=extra
    )
    made.created, made.msecs = 1768469400.25, 250.0
    return made


def line_of(message: object = "event", *args: object, **extra: object) -> dict[str, Any]:
    """Return the record as parsed from its log line."""
    text = JsonLines().format(record(message, *args, **extra))
    assert "\n" not in text
    assert "\r" not in text
    text.encode("utf-8")
    return dict(orjson.loads(text))


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, restored afterwards."""
    logger, quiet = logging.getLogger(), logging.getLogger("asyncio")
    before = (logger.handlers[:], logger.level, quiet.level)
    yield logger
    logger.handlers[:] = before[0]
    logger.setLevel(before[1])
    quiet.setLevel(before[2])


# One line, one object


def test_line_has_time_level_logger_message_and_extra_fields() -> None:
    assert line_of("hello %s", "world", request_id="req_1", status=200, ms=0.5, key=None) == {
        "time": "2026-01-15T09:30:00.250Z",
        "level": "info",
        "logger": "penstock.test",
        "message": "hello world",
        "request_id": "req_1",
        "status": 200,
        "ms": 0.5,
        "key": None,
    }


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_inside_its_string(text: str) -> None:
    line = line_of("path: %s", text, path=text)
    assert set(line) == {"time", "level", "logger", "message", "path"}
    assert line["level"] == "info"
    if text.isprintable() and "://" not in text:
        assert (line["message"], line["path"]) == (f"path: {text}", text)


@pytest.mark.parametrize(
    "value",
    [
        2**64,
        -(2**70),
        {1: 2},
        {"a": {2: "\ud800"}},
        {1, 2},
        b"\xff",
        object(),
        float("nan"),
        ValueError("x"),
        ["\udc00"],
    ],
)
def test_value_that_is_not_json_does_not_suppress_the_line(value: object) -> None:
    line = line_of(status=200, value=value)
    assert line["message"] == "event"
    assert "value" in line


def test_exception_is_written_as_one_line() -> None:
    try:
        raise ValueError(f"first\nsecond {KEY}")
    except ValueError:
        made = record()
        made.exc_info = sys.exc_info()
    text = JsonLines().format(made)
    assert "\n" not in text
    line = orjson.loads(text)
    assert "Traceback" in line["exception"]
    assert f"second {KEY[:9]}[redacted]" in line["exception"]


# No secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (KEY, "svc_live_[redacted]"),
        (TEST_KEY, "svc_test_[redacted]"),
        (f"key={KEY}&x=1", "key=svc_live_[redacted]&x=1"),
        (f"{KEY},{TEST_KEY}", "svc_live_[redacted],svc_test_[redacted]"),
        (KEY[:20], "svc_live_[redacted]"),
        (WEBHOOK, "whsec_[redacted]"),
        ("svc_live_ is a prefix", "svc_live_ is a prefix"),
        ("https://user:hunter2@example.com", "https://[redacted]@example.com"),
        ("https://user:hunter2@example.com:8545/", "https://[redacted]@example.com:8545"),
        ("postgresql://u:hunter2@/d?host=s", "postgresql://[redacted]@/[redacted]"),
        ("https://user:hunt@er2@example.com", "https://[redacted]@example.com"),
        ("https://user:hunter2/swordfish@example.com", "https://[redacted]"),
        ("https://hunter2@example.com", "https://[redacted]@example.com"),
        ("https://example.com/v2/swordfish", "https://example.com/[redacted]"),
        ("https://example.com?token=swordfish", "https://example.com/[redacted]"),
        ("wss://example.com#swordfish", "wss://example.com/[redacted]"),
        (f"wss://example.com/ws?apiKey={KEY}", "wss://example.com/[redacted]"),
        ("http://127.0.0.1:8545 is up", "http://127.0.0.1:8545 is up"),
        ("from http://a.b to ops@example.com", "from http://a.b to ops@example.com"),
        ("http://u:hunter2@a/x and http://u:swordfish@b/y", "http://[redacted]@a/[redacted] and http://[redacted]@b/[redacted]"),
    ],
)  # fmt: skip
def test_secret_is_redacted_everywhere(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert line_of("%s", text)["message"] == shown
    assert line_of(nested={"list": [text]})["nested"] == {"list": [shown]}


@pytest.mark.parametrize(
    "secret",
    [KEY, TEST_KEY, WEBHOOK, "https://u:hunter2@example.com/swordfish", 'https://u:hunter2"swordfish@example.com'],
)
@pytest.mark.parametrize(
    "around", ["{}", '"{}"', "\n{}\n", "\\{}", "x{}", "<{}>", "a@b {} c@d", "\ud800{}", "{}\ud800"]
)
def test_secret_is_redacted_in_any_surrounding_text(secret: str, around: str) -> None:
    text = around.format(secret)
    line = repr(line_of("%s", text, also=text, last="ops@example.com"))
    assert not [hidden for hidden in HIDDEN if hidden in line]
    assert "ops@example.com" in line


def test_url_in_one_member_does_not_redact_the_next() -> None:
    line = line_of("event", where={"url": "http://a.b"}, mail="ops@example.com")
    assert (line["where"], line["mail"]) == ({"url": "http://a.b"}, "ops@example.com")


# Logging never blocks


def test_all_lines_are_written_in_order_before_exit(root: logging.Logger) -> None:
    stream = io.StringIO()
    listener = start_logging("info", stream)
    log = logging.getLogger("penstock.test")
    for number in range(100):
        log.info("event", extra={"number": number})
    log.debug("unheard")
    logging.getLogger("asyncio").warning("unheard")
    listener.stop()
    lines = [orjson.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["number"] for line in lines] == list(range(100))


@pytest.mark.parametrize(("level", "heard"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_lines_below_the_level_are_not_written(root: logging.Logger, level: str, heard: int) -> None:
    stream = io.StringIO()
    listener = start_logging(level, stream)
    for say in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("penstock.test"), say)("event")
    listener.stop()
    assert len(stream.getvalue().splitlines()) == heard


def test_full_queue_drops_and_counts_lines_without_blocking(root: logging.Logger) -> None:
    """A pipe without a reader: it takes 64 KB, then its writer blocks."""
    reader, writer = os.pipe()
    sent, more = QUEUE + 5_000, 10
    before = _dropped()
    with open(writer, "w") as stream:
        listener = start_logging("info", stream)
        log = logging.getLogger("penstock.test")
        for number in range(sent):
            log.info("x" * 100, extra={"number": number})
        assert _dropped() - before > 0
        lost = int(_dropped() - before)
        received: list[bytes] = []
        reading = threading.Thread(target=_read_all, args=(reader, received))
        reading.start()
        assert isinstance(listener.queue, queue.Queue)
        listener.queue.join()
        for number in range(more):
            log.info("later", extra={"number": sent + number})
        listener.stop()
    reading.join(10)
    lines = [orjson.loads(line) for line in b"".join(received).splitlines()]
    numbers = [line["number"] for line in lines]
    assert numbers == sorted(numbers)
    assert len(numbers) == sent - lost + more
    assert numbers[-more:] == list(range(sent, sent + more))


def _dropped() -> float:
    (metric,) = telemetry.log_lines_dropped_total.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_total"))


def _read_all(fd: int, into: list[bytes]) -> None:
    with open(fd, "rb") as stream:
        while part := stream.read1():
            into.append(part)


def test_metric_names_start_with_penstock() -> None:
    metrics = [value for value in vars(telemetry).values() if hasattr(value, "collect") and hasattr(value, "_name")]
    assert len(metrics) >= 7
    assert all(metric._name.startswith("penstock_") for metric in metrics)


# Calls, counted by each worker and added up on each scrape


def scraped(directory: Path) -> dict[tuple[str, ...], float]:
    samples = [sample for metric in CallCollector(directory).collect() for sample in metric.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_directory_without_files_has_no_calls(tmp_path: Path) -> None:
    assert scraped(tmp_path) == {}


def test_calls_of_all_workers_are_added_up(tmp_path: Path) -> None:
    network = "ethereum/mainnet"
    for worker in range(3):
        tallies = Tallies()
        tally = tallies.of(network, "eth_call")
        assert tallies.of(network, "eth_call") is tally
        tally.count("results", "", 3, 0.002)
        tally.count("results", "hit", 3, 0.002)
        tally.count("errors", "join", 3, 0.002)
        tally.count("faults", "", 0, 0.002)
        tallies.of(network, "eth_getLogs").count("results", "hit", 8, 99.0)
        tallies.of(network, "never_called")
        tallies.write(tmp_path / f"calls-{worker}.json", [(network, f"{network}#1", 5, 2, 1)])
    found = scraped(tmp_path)
    assert not [name for name in found if "never_called" in name]
    for name, value in {
        ("penstock_calls_total", network, "eth_call", "result"): 6,
        ("penstock_calls_total", network, "eth_call", "error"): 3,
        ("penstock_calls_total", network, "eth_call", "fault"): 3,
        ("penstock_calls_total", network, "eth_getLogs", "result"): 3,
        ("penstock_calls_total", network, "eth_getLogs", "error"): 0,
        ("penstock_cache_total", network, "hit"): 6,
        ("penstock_cache_total", network, "join"): 3,
        ("penstock_call_units_total", network, "eth_call"): 27,
        ("penstock_call_units_total", network, "eth_getLogs"): 24,
        ("penstock_call_seconds_count", network, "eth_call"): 12,
        ("penstock_call_seconds_sum", network, "eth_call"): 0.024,
        ("penstock_call_seconds_sum", network, "eth_getLogs"): 297.0,
        ("penstock_upstream_calls_total", f"{network}#1", "answered"): 15,
        ("penstock_upstream_calls_total", f"{network}#1", "failed"): 6,
        ("penstock_upstream_calls_total", f"{network}#1", "refused"): 3,
    }.items():
        assert found[name] == pytest.approx(value), name


@pytest.mark.parametrize(
    ("seconds", "below", "edge"), [(0.0, "0.0005", 1), (0.001, "0.001", 1), (0.0011, "0.001", 0), (60.0, "10.0", 0)]
)
def test_duration_of_a_call_is_counted_in_its_bucket(tmp_path: Path, seconds: float, below: str, edge: int) -> None:
    tallies = Tallies()
    tallies.of("a/b", "m").count("results", "", 1, seconds)
    tallies.write(tmp_path / "calls-1.json")
    found = scraped(tmp_path)
    assert found["penstock_call_seconds_bucket", "a/b", "m", below] == edge
    assert found["penstock_call_seconds_bucket", "a/b", "m", "+Inf"] == 1


def test_counts_are_written_again_only_if_they_have_changed(tmp_path: Path) -> None:
    tallies, file = Tallies(), tmp_path / "calls-1.json"
    tallies.write(file, [("one/main", "one/main#1", 1, 0, 0)])
    file.unlink()
    tallies.write(file, [("one/main", "one/main#1", 1, 0, 0)])
    assert not file.exists()
    tallies.write(file, [("one/main", "one/main#1", 2, 0, 0)])
    assert file.exists()


def test_broken_file_of_one_worker_does_not_fail_the_scrape(tmp_path: Path) -> None:
    tallies = Tallies()
    tallies.of("a/b", "m").count("results", "", 1, 0.1)
    tallies.write(tmp_path / "calls-1.json")
    (tmp_path / "calls-2.json").write_bytes(b'{"calls": [')
    assert scraped(tmp_path)["penstock_calls_total", "a/b", "m", "result"] == 1


def test_process_killed_with_an_empty_file_does_not_fail_the_scrape(tmp_path: Path) -> None:
    """The files of its counters stay until the service ends."""
    whole = MmapedDict(str(tmp_path / "counter_1.db"))  # type: ignore[no-untyped-call]
    whole.write_value(mmap_key("a", "a_total", [], [], "A"), 3.0, 0.0)  # type: ignore[no-untyped-call]
    whole.close()  # type: ignore[no-untyped-call]
    for kind in ("counter", "gauge_livemin", "histogram"):
        (tmp_path / f"{kind}_2.db").touch()
    found = {sample.name: sample.value for family in Scrape(tmp_path).families() for sample in family.samples}
    assert found["a_total"] == 3.0
