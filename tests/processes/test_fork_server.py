"""The fork server: its processes are like those that run separate interpreters, and none outlives the supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proxy.processes.fork_server import METRICS, ForkRequest, ForkServer
from proxy.processes.fork_server_process import ForkServerProcess, start_fork_server
from proxy.processes.process_starter import ProcessStarter
from proxy.processes.supervised_process import ChildProcess
from tests.service import ROOT, children, holds, is_running, until

# A command that prints the value of each line. Its module is imported by the fork server.
PROBE = """
import gc, os, random, sys, threading
from prometheus_client import Counter
from proxy.__main__ import COMMANDS

GENERATION = 1
counted = Counter("counted", "A metric")
COMMANDS["probe"] = "probe"
sys.modules["proxy.commands.probe"] = sys.modules[__name__]

def preload():
    pass

def register(commands):
    commands.add_parser("probe").set_defaults(run=run)

def run(_):
    for line in sys.stdin:
        print(eval(line), flush=True)
    return 0
"""
# A process that should have ended by now is killed.
NOW, LATER = 0.0, 600.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "metrics").mkdir()
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", METRICS: str(tmp_path / "metrics")}


def probe(*fds: int, grace_s: float = NOW) -> ForkRequest:
    return ForkRequest(["probe"], list(fds), grace_s)


async def value(process: ChildProcess, expression: str) -> str:
    process.write(expression.encode() + b"\n")
    return (await process.stdout.readline()).decode().strip()


async def end(*processes: ChildProcess) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)
        await process.wait()


async def started(environment: dict[str, str], *fds: int) -> ForkServerProcess:
    return await start_fork_server(("probe",), fds=fds, environment=environment, stderr=None)


@pytest.fixture
async def server(environment: dict[str, str]) -> AsyncIterator[ForkServerProcess]:
    running = await started(environment)
    yield running
    await running.end()


@pytest.fixture
async def starter(environment: dict[str, str]) -> AsyncIterator[ProcessStarter]:
    made = ProcessStarter(("probe",), environment, fds=(), log_to=None)
    yield made
    await made.retire()
    await made.close()


async def test_forked_process_has_its_own_session_command_and_randomness(server: ForkServerProcess) -> None:
    one, other = [await server.fork(probe(), None) for _ in range(2)]
    for process in (one, other):
        assert await value(process, "os.getpid()") == await value(process, "os.getsid(0)") == str(process.pid)
        assert (await value(process, "open('/proc/self/cmdline').read().split(chr(0))[3:5]")) == "['probe', '']"
        assert await value(process, "threading.active_count(), gc.get_freeze_count() > 1000") == "(1, True)"
    assert await value(one, "random.random()") != await value(other, "random.random()")
    await end(one, other)


async def test_forked_process_inherits_only_its_own_files(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, open(os.devnull, "rb") as shared:
        server = await started(environment, listener.fileno(), shared.fileno())
        older = await server.fork(probe(), None)
        process = await server.fork(probe(shared.fileno()), None)
        await value(process, "counted.inc()")
        found = "[os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if int(fd) > 2]"
        kept = await value(process, found)
        assert os.devnull in kept
        assert not [kind for kind in ("socket:", "anon_inode:", "pipe:") if kind in kept]
        await end(older, process)
        await server.end()


async def test_metrics_belong_to_the_forked_process(server: ForkServerProcess, environment: dict[str, str]) -> None:
    process = await server.fork(probe(), None)
    assert not os.listdir(environment[METRICS])
    await value(process, "counted.inc()")
    assert os.listdir(environment[METRICS]) == [f"counter_{process.pid}.db"]
    await end(process)


async def test_processes_end_with_the_supervisor_even_if_they_are_stopped(server: ForkServerProcess) -> None:
    stopped = await server.fork(probe(grace_s=NOW), None)
    os.kill(stopped.pid, signal.SIGSTOP)
    await server.end()
    async with asyncio.timeout(20):
        await stopped.wait()
    assert not is_running(stopped.pid)


async def test_server_of_a_dead_supervisor_waits_for_processes_that_drain(server: ForkServerProcess) -> None:
    draining = await server.fork(probe(grace_s=LATER), None)
    ending = asyncio.get_running_loop().create_task(server.end())
    await holds(lambda: not server.has_ended, for_s=0.1)
    assert await value(draining, "1 + 1") == "2"
    assert not server.has_ended
    await end(draining)
    await ending
    assert server.has_ended


async def test_retired_server_closes_sockets_and_ends_after_its_processes(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        server = await started(environment, listener.fileno())
        process = await server.fork(probe(grace_s=LATER), None)
        assert await value(process, "1 + 1") == "2"  # by now it has closed the socket too
        await server.retire()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address).close()
    assert await value(process, "1 + 1") == "2"
    assert not server.has_ended
    await end(process)
    await until(lambda: server.has_ended)
    await server.end()


def test_server_ends_quietly_if_its_supervisor_ended_while_it_loaded() -> None:
    """As after SIGTERM during a reload."""
    control, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor.close()
    with control:
        assert ForkServer(control, ()).run() is None


async def test_answer_to_a_cancelled_request_is_not_taken_for_another(server: ForkServerProcess) -> None:
    forking = asyncio.get_running_loop().create_task(server.fork(probe(), None))
    await asyncio.sleep(0)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    process = await server.fork(probe(), None)
    assert await value(process, "os.getpid()") == str(process.pid)
    await end(process)


async def test_processes_go_on_without_their_server(starter: ProcessStarter, caplog: pytest.LogCaptureFixture) -> None:
    first = await starter.start(probe())
    os.kill(int(await value(first, "os.getppid()")), signal.SIGKILL)
    second = await starter.start(probe())
    assert await value(first, "os.getpid()") == str(first.pid)
    assert await value(second, "os.getppid()") not in ("1", await value(first, "os.getppid()"))
    assert [record.getMessage() for record in caplog.records] == ["starting another fork server"]
    await end(first, second)


async def test_renewed_server_runs_new_code_and_the_old_one_ends(starter: ProcessStarter, tmp_path: Path) -> None:
    old = await starter.start(probe())
    before = int(await value(old, "os.getppid()"))
    (tmp_path / "probe.py").write_text(PROBE.replace("GENERATION = 1", "GENERATION = 22"))
    starter.renew()
    new = await starter.start(probe())
    assert [await value(each, "GENERATION") for each in (old, new)] == ["1", "22"]
    await end(old)
    await until(lambda: not is_running(before))
    await end(new)


async def test_broken_code_leaves_the_old_server_in_use(
    starter: ProcessStarter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = await starter.start(probe())
    (tmp_path / "probe.py").write_text("raise SystemExit(1)")
    starter.renew()
    second = await starter.start(probe())
    assert await value(second, "os.getppid()") == await value(first, "os.getppid()")
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert line.getMessage() == "the fork server did not start"
    await end(first, second)


async def test_without_pidfds_each_process_has_its_own_interpreter(
    starter: ProcessStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process = await starter.start(ForkRequest(["worker", "--help"], [], NOW))
    assert (await process.stdout.readline()).startswith(b"usage: ")
    await process.wait()
    assert process.has_ended
    assert process.pid not in dict(children(os.getpid()))
