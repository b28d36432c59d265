"""Worker processes on one port.

The supervisor owns what must outlive a worker: the listening sockets, one per worker on the same port (SO_REUSEPORT), and
the shared windows. A worker that dies leaves its queue of connections in the kernel for its successor; a worker that is
replaced hands over without a gap, because both listen on the same socket for a moment.

A worker is tied to its supervisor by its standard input: settings come in on it, and its end means that the supervisor is
gone, so that no kill leaves an orphan. On its standard output it says one word, when it is ready.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import orjson

from proxy.errors import StartError
from proxy.process import Tasks
from proxy.settings import Settings
from proxy.store import windows
from proxy.telemetry import Scrape

log = logging.getLogger("penstock.supervisor")

BACKLOG = 4096
# Loading 100,000 keys takes about a second; a database that is just coming up takes a few.
READY_TIMEOUT_S = 60.0
# Beyond the drain itself, before a worker is killed.
STOP_GRACE_S = 5.0
# A worker that lived this long was healthy: its successor starts at once.
HEALTHY_S = 5.0
LONGEST_PAUSE_S = 5.0
READY = b"ready\n"


class WorkerFailed(Exception):
    """A worker ended before it was ready."""


class Worker:
    """One running worker process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.began = time.monotonic()

    def __repr__(self) -> str:
        state = "running" if self._process.returncode is None else f"ended with {self._process.returncode}"
        return f"<Worker {self.pid} {state}>"

    async def ready(self) -> None:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                said = await self._process.stdout.readline()
        except TimeoutError:
            said = b""
        if said != READY:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            raise WorkerFailed(f"worker {self.pid} ended before it was ready")

    async def ended(self) -> int:
        return await self._process.wait()

    async def stop(self, within_s: float) -> None:
        """SIGTERM drains; what is left after the deadline is killed."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(within_s):
                await self._process.wait()
        except TimeoutError:
            log.warning("worker killed after its drain deadline", extra={"worker": self.pid})
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


class Supervisor:
    def __init__(self, settings: Settings, *, log_to: Path | None = None) -> None:
        self.settings = settings
        self.count = settings.server.workers or os.cpu_count() or 1
        self._log_to = log_to
        self._tasks = Tasks()
        self._listeners: list[socket.socket] = []
        self._windows_fd = -1
        self._workers: dict[int, Worker] = {}
        self._reload: list[asyncio.Event] = []
        self._stopping = False
        self._metrics_dir = tempfile.TemporaryDirectory(prefix="penstock-metrics-")
        self._scrape = Scrape(self._metrics_dir.name)
        self.port = 0
        self.metrics_port = 0

    def __repr__(self) -> str:
        return f"<Supervisor port {self.port}, {len(self._workers)} of {self.count} workers>"

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers.values()]

    async def start(self) -> None:
        """Listen, serve metrics, start every worker, and return when all are ready."""
        self._listeners = listeners(self.settings.server.host, self.settings.server.port, self.count)
        self.port = self._listeners[0].getsockname()[1]
        self._windows_fd = windows.create()
        self.metrics_port = self._serve_metrics()
        self._reload = [asyncio.Event() for _ in range(self.count)]
        results = await asyncio.gather(*(self._spawn(place) for place in range(self.count)), return_exceptions=True)
        for place, result in enumerate(results):
            if isinstance(result, Worker):
                self._workers[place] = result
        if failed := [str(result) for result in results if isinstance(result, BaseException)]:
            await self.stop()
            raise StartError(failed)
        for place in range(self.count):
            self._tasks.start(f"worker-{place}", lambda place=place: self._keep(place))  # type: ignore[misc]

    def reload(self, settings: Settings) -> None:
        """Replace every worker by one with the new settings, one after the other's drain begins; no request is lost."""
        self.settings = settings
        for event in self._reload:
            event.set()

    async def stop(self) -> None:
        self._stopping = True
        await self._tasks.close()
        within_s = self.settings.server.drain_s + STOP_GRACE_S
        await asyncio.gather(*(worker.stop(within_s) for worker in self._workers.values()))
        self._workers.clear()
        for listener in self._listeners:
            listener.close()
        if self._windows_fd >= 0:
            os.close(self._windows_fd)
            self._windows_fd = -1
        self._scrape.close()
        self._metrics_dir.cleanup()

    async def _spawn(self, place: int) -> Worker:
        listener = self._listeners[place]
        log_to = open(self._log_to, "ab") if self._log_to else None  # noqa: SIM115
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "proxy", "worker"),
                *("--listen-fd", str(listener.fileno()), "--windows-fd", str(self._windows_fd)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_to,
                pass_fds=(listener.fileno(), self._windows_fd),
                env=self._environment(),
                start_new_session=True,
            )
        finally:
            if log_to:
                log_to.close()
        worker = Worker(process)
        assert process.stdin is not None
        process.stdin.write(orjson.dumps(self.settings.tree) + b"\n")
        await worker.ready()
        return worker

    def _environment(self) -> Mapping[str, str]:
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        return {**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._metrics_dir.name, "PYTHONPATH": path}

    async def _keep(self, place: int) -> None:
        """Keep one place filled: replace its worker when it dies or when the settings change."""
        pause_s = 0.0
        while not self._stopping:
            worker = self._workers.get(place)
            if worker is None:
                await asyncio.sleep(pause_s)
                pause_s = min(max(0.1, pause_s * 2), LONGEST_PAUSE_S)
                with suppress(WorkerFailed):
                    self._workers[place] = await self._spawn(place)
                continue
            if await self._until_ended_or_reload(worker, place):
                await self._replace(place, worker)
                continue
            lived_s = time.monotonic() - worker.began
            log.error("worker died", extra={"worker": worker.pid, "lived_s": round(lived_s, 1)})
            self._scrape.worker_ended(worker.pid)
            del self._workers[place]
            if lived_s > HEALTHY_S:
                pause_s = 0.0

    async def _until_ended_or_reload(self, worker: Worker, place: int) -> bool:
        """True for a reload, False for a death."""
        reload = self._reload[place]
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(worker.ended()), group.create_task(reload.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        is_reload = reload.is_set()
        reload.clear()
        return is_reload

    async def _replace(self, place: int, old: Worker) -> None:
        try:
            self._workers[place] = await self._spawn(place)
        except WorkerFailed as exc:
            log.error("reload failed: the old worker goes on", extra={"reason": str(exc)})
            return
        await old.stop(self.settings.server.drain_s + STOP_GRACE_S)
        self._scrape.worker_ended(old.pid)

    def _serve_metrics(self) -> int:
        wanted = self.settings.metrics
        try:
            return self._scrape.serve(wanted.host, wanted.port)
        except OSError as exc:
            raise StartError([f"metrics.port: {wanted.port} cannot be used ({exc.strerror}): choose another"]) from None


def listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """One listening socket per worker, all on one port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # SO_REUSEPORT would let two services share a port by accident: ask for it alone first.
        with _bound(family, host, port, shared=False) as probe:
            port = probe.getsockname()[1]
        found = [_bound(family, host, port, shared=True) for _ in range(count)]
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise StartError(
            [f"server.port: {host}:{port} cannot be used ({reason}): choose another with --port"]
        ) from None
    for listener in found:
        listener.listen(BACKLOG)
    return found


def _bound(family: int, host: str, port: int, *, shared: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    return listener
