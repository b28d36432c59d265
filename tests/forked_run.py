"""Runs tests in several processes, which are forked after the tests are collected.

Collecting takes as long as a hundred tests; pytest-xdist would collect them in every process. Each process takes one unit of
files after the other (see scheduling.py) and sends its reports to the first one, which counts and prints them.
"""

from __future__ import annotations

import os
import signal
import struct
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from proxy.dev.child import die_with_parent
from tests import scheduling

PROCESSES = "--processes"
# Files that the line about CPU time names.
MOST_SHOWN = 20
_NUMBER = struct.Struct("=H")
# A pipe holds this much without a reader.
_PIPE_BYTES = 4096

Unit = list[pytest.Item]


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(PROCESSES, type=int, default=0, help="run the tests in this many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption(PROCESSES)
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    units = units_of(session.items)
    ForkedRun(session, units).run(min(count, len(units)))
    return True


def units_of(items: list[pytest.Item]) -> list[Unit]:
    """Tests by the unit of their file, in the order of their first tests."""
    units: dict[str, Unit] = {}
    for item in items:
        units.setdefault(scheduling.unit_of(item.nodeid.partition("::")[0]), []).append(item)
    return [*units.values()]


class ForkedRun:
    """The first process: starts the others and reports for them."""

    def __init__(self, session: pytest.Session, units: list[Unit]) -> None:
        self._session = session
        self._queue = UnitQueue(units)
        self._running: dict[Connection, TestProcess] = {}
        # CPU time by file, with that of the services that its tests have started and ended.
        self._cpu_s: defaultdict[str, float] = defaultdict(float)

    def __repr__(self) -> str:
        return f"<ForkedRun of {len(self._running)} processes>"

    def run(self, count: int) -> None:
        try:
            for number in range(count):
                self._fork(number)
            while self._running:
                for connection in wait([*self._running]):
                    assert isinstance(connection, Connection)
                    self._receive(self._running[connection])
            self._show_cpu_time()
        finally:
            for left in self._running.values():
                left.kill()

    def _show_cpu_time(self) -> None:
        """The wall time depends on the machine and on how much waits: this is what the tests cost."""
        terminal = self._session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            files = sorted(self._cpu_s, key=self._cpu_s.__getitem__, reverse=True)
            dearest = ", ".join(f"{file} {self._cpu_s[file]:.0f}" for file in files[:MOST_SHOWN])
            terminal.write_line(f"\nCPU seconds: {sum(self._cpu_s.values()):.0f}; of these {dearest}")

    def _fork(self, number: int) -> None:
        reader, writer = Pipe(duplex=False)
        config = self._session.config
        base = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        pid = os.fork()
        if not pid:
            reader.close()
            _work(config, self._queue, ReportSender(config, writer), base / f"p{number}")
        writer.close()
        self._running[reader] = TestProcess(pid, reader)

    def _receive(self, process: TestProcess) -> None:
        try:
            message: Started | Finished | str | None = process.reader.recv()
        except EOFError:
            raise ProcessEndedError(f"{process} ended early: {process.ended()}") from None
        match message:
            case Started(nodeid):
                process.nodeid = nodeid
            case Finished():
                self._report(message)
            case str():
                raise ProcessEndedError(f"{process} failed:\n{message}")
            case None:
                process.ended()
                del self._running[process.reader]

    def _report(self, finished: Finished) -> None:
        session, hook = self._session, self._session.config.hook
        self._cpu_s[finished.nodeid.partition("::")[0]] += finished.cpu_s
        hook.pytest_runtest_logstart(nodeid=finished.nodeid, location=finished.location)
        for data in finished.reports:
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=finished.nodeid, location=finished.location)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)


class ProcessEndedError(Exception):
    """A test process has ended before its last test. The rest of its tests has not run."""


class TestProcess:
    """A forked process, as the first one sees it."""

    __test__ = False

    def __init__(self, pid: int, reader: Connection) -> None:
        self._pid = pid
        self.reader = reader
        # The test that it has started last.
        self.nodeid = ""

    def __repr__(self) -> str:
        return f"<TestProcess {self._pid} {self.nodeid}>"

    def ended(self) -> str:
        """Wait for its end."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return f"exit status {code}" if code >= 0 else signal.Signals(-code).name

    def kill(self) -> None:
        try:
            os.kill(self._pid, signal.SIGTERM)
            self.ended()
        except (ProcessLookupError, ChildProcessError):
            pass


class UnitQueue:
    """The numbers of the units that no process has taken yet: the content of a pipe."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._source, target = os.pipe()
        data = b"".join(map(_NUMBER.pack, range(len(units))))
        assert len(data) <= _PIPE_BYTES, "the pipe would block"
        os.write(target, data)
        os.close(target)

    def __repr__(self) -> str:
        return f"<UnitQueue of {len(self._units)}>"

    def tests(self) -> Iterator[pytest.Item]:
        """The tests of one unit after the other. A unit is taken when its first test is needed."""
        while data := os.read(self._source, _NUMBER.size):
            yield from self._units[_NUMBER.unpack(data)[0]]


# The forked processes


@dataclass(frozen=True, slots=True)
class Started:
    nodeid: str


@dataclass(frozen=True, slots=True)
class Finished:
    nodeid: str
    location: tuple[str, int | None, str]
    reports: list[dict[str, Any]]
    cpu_s: float


class ReportSender:
    """The plugin that runs a test without printing its reports."""

    def __init__(self, config: pytest.Config, writer: Connection) -> None:
        self._config = config
        self.writer = writer

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        self.writer.send(Started(item.nodeid))
        before_s = _cpu_s()
        found = runtestprotocol(item, log=False, nextitem=nextitem)
        serialize = self._config.hook.pytest_report_to_serializable
        reports = [serialize(config=self._config, report=report) for report in found]
        self.writer.send(Finished(item.nodeid, item.location, reports, _cpu_s() - before_s))
        return True


def _cpu_s() -> float:
    """CPU time of this process and of the children that have ended."""
    return sum(os.times()[:4])


def _work(config: pytest.Config, queue: UnitQueue, sender: ReportSender, temporary: Any) -> None:
    """Run tests until none is left, and end the process."""
    try:
        die_with_parent(signal.SIGTERM)
        _separate(config, temporary)
        config.pluginmanager.register(sender)
        tests = queue.tests()
        item = next(tests, None)
        while item is not None:
            following = next(tests, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        sender.writer.send(None)
    except BaseException:
        sender.writer.send(traceback.format_exc())
    finally:
        os._exit(0)


def _separate(config: pytest.Config, temporary: Any) -> None:
    """A directory and files for captured output of its own."""
    temporary.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = temporary  # type: ignore[attr-defined]
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
