"""The supervisor: runs worker processes on one port.

The supervisor owns everything that must outlive a worker: the listening sockets, one per worker on the same port
(SO_REUSEPORT), the shared memory, and the directory with the workers' copies of the keys. If a worker dies or hangs, the
others accept from its socket (`listening_sockets.py`) until its successor does, which can start without Postgres. A replacement
causes no gap: both workers listen on the same socket for a moment. On shutdown, new connections are refused, workers accept
those already queued, and only then do the sockets close. No connection is lost in between.

Besides workers there are *parts* (see `background`): processes that do not listen, such as the follower. The supervisor's role
decides which of them run, so that one machine can serve and another can follow.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from proxy.errors import StartError
from proxy.processes.control_messages import LEAVING_LINE
from proxy.processes.fork_server import METRICS, ForkRequest
from proxy.processes.listening_sockets import unattended_line
from proxy.processes.process_starter import ProcessStarter
from proxy.processes.run_directory import RunDirectory
from proxy.processes.supervised_process import STOP_GRACE_S, SupervisedProcess, WorkerFailed
from proxy.settings import Certificates, Settings, file_versions, read_certificates
from proxy.store.postgres.local_copy import CopyDirectory
from proxy.store.shared_memory import host_memory, rate_buckets
from proxy.tasks import ROLES, Tasks
from proxy.telemetry import Scrape

log = logging.getLogger("penstock.supervisor")

BACKLOG = 4096
# A worker that ran this long was healthy: its successor starts immediately.
HEALTHY_S = 5.0
LONGEST_PAUSE_S = 5.0
# How long an unfinished TCP handshake may take to reach the queue, and how long a queue may take to empty.
HANDSHAKE_S, QUEUE_S = 0.2, 2.0
# Settings of the supervisor itself, which a reload does not change.
FIXED = ("server.host", "server.port", "server.workers", "metrics.host", "metrics.port")

# The code of workers and parts.
WORKER_MODULE, PART_MODULE = "proxy.processes.worker", "proxy.compose.background"
# If the supervisor is gone, the fork server kills a process this long after it should have killed itself.
KILL_AFTER_S = 1.0

ProcessChange = Literal["ended", "hung", "reload"]


class Supervisor:
    """Call `start`, then `reload` any number of times, then `stop`. `stop` is allowed at any time, even during a start."""

    def __init__(self, settings: Settings, *, role: str = "all", log_to: Path | None = None) -> None:
        has_workers, parts = ROLES[role]
        self.settings = settings
        self.count = (settings.server.workers or os.cpu_count() or 1) if has_workers else 0
        # Without networks to follow, a follower would only use memory.
        has_follower = settings.follower.networks or settings.relays
        self.parts = tuple(name for name in parts if name != "follower" or has_follower)
        self._certificates: Certificates | None = None
        self._data_files = file_versions(settings.data_files.directory)
        self._log_to = log_to
        self._tasks = Tasks()
        self._listeners: list[socket.socket] = []
        self._buckets_fd = self._memory_fd = -1
        # The process id of the last worker or part at each place that was ready.
        self._last_ready: dict[int | str, int] = {}
        # Workers by the index of their listening socket, parts by name.
        self._workers: dict[int | str, SupervisedProcess] = {}
        # Replaced processes that are still draining.
        self._retiring: set[SupervisedProcess] = set()
        self._reload: dict[int | str, asyncio.Event] = {}
        # The processes that a reload has yet to replace, and when it began.
        self._reloading: dict[int | str, float] = {}
        # Identifies this host among those that share a Valkey.
        self._host = secrets.token_hex(8)
        self._directory = RunDirectory()
        self._starter: ProcessStarter | None = None
        self._scrape: Scrape | None = None
        self.port = 0
        self.metrics_port = 0

    def __repr__(self) -> str:
        return f"<Supervisor port {self.port}, {len(self._workers)} of {len(self.places)} processes>"

    @property
    def _copies(self) -> CopyDirectory:
        return CopyDirectory(self._directory.path)

    @property
    def places(self) -> tuple[int | str, ...]:
        return (*range(self.count), *self.parts)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers.values()]

    async def start(self) -> None:
        """Listen, serve metrics, start every worker, and return when all are ready."""
        if self.count:
            self._certificates = read_certificates(self.settings.server.tls)
            self._listeners = listeners(self.settings.server.host, self.settings.server.port, self.count)
            self.port = self._listeners[0].getsockname()[1]
        self._buckets_fd = rate_buckets.create()
        self._memory_fd = host_memory.create()
        self._directory.open()
        self._starter = self._process_starter()
        self.metrics_port = self._serve_metrics(self._directory.path)
        self._reload = {place: asyncio.Event() for place in self.places}
        written = self._log_size()
        results = await asyncio.gather(*(self._fill(place) for place in self.places), return_exceptions=True)
        if failed := [result for result in results if isinstance(result, BaseException)]:
            await self.stop()
            raise StartError([f"{failed[0]}{self._log_since(written)}"])
        for place in self.places:
            self._tasks.start("place", lambda place=place: self._keep_running(place), of=place)  # type: ignore[misc]

    def reload(self, settings: Settings) -> None:
        """Start a process with the new settings for every old one, then drain the old one. No request is lost.

        If only certificates have changed, the processes stay and use them for new connections. Raises StartError if a
        certificate cannot be used.
        """
        certificates = read_certificates(settings.server.tls) if self.count else None
        data_files = file_versions(settings.data_files.directory)
        are_renewed = certificates is not None and certificates != self._certificates
        are_alone = (settings.tree, data_files) == (self.settings.tree, self._data_files)
        self._certificates, self._data_files = certificates, data_files
        if are_renewed and are_alone:
            for worker in self._workers.values():
                self._send_certificates(worker)
            return
        if fixed := [name for name in FIXED if _leaf(settings, name) != _leaf(self.settings, name)]:
            log.warning("some changed settings need a restart", extra={"settings": fixed})
        self.settings = settings
        if self._starter is not None:
            self._starter.renew()
        self._reloading = {place: time.monotonic() for place in self._reload}
        for event in self._reload.values():
            event.set()

    def _send_certificates(self, worker: SupervisedProcess) -> None:
        """Send the certificates to a worker that was started with others. Parts have none."""
        if self._certificates is not None and worker.certificates not in (None, self._certificates):
            worker.certificates = self._certificates
            worker.send(self._certificates.line())

    async def stop(self) -> None:
        await self._tasks.close()
        await self._leave()
        if self._starter is not None:
            await self._starter.retire()
        await self._close_listeners()
        await asyncio.gather(*(worker.stop() for worker in (*self._workers.values(), *self._retiring)))
        self._workers.clear()
        self._retiring.clear()
        if self._starter is not None:
            await self._starter.close()
            self._starter = None
        if self._buckets_fd >= 0:
            os.close(self._buckets_fd)
            os.close(self._memory_fd)
            self._buckets_fd = self._memory_fd = -1
        if self._scrape is not None:
            self._scrape.close()
            self._scrape = None
        self._directory.remove()

    async def _leave(self) -> None:
        """Let load balancers notice that the service is not ready, while it still serves."""
        if not self._listeners or not self._workers:
            return
        for worker in self._workers.values():
            worker.send(LEAVING_LINE)
        await asyncio.sleep(self.settings.server.leave_s)

    async def _close_listeners(self) -> None:
        """Refuse new connections, let the workers accept the queued ones, then close the sockets."""
        are_closed = [refuse_new(listener) for listener in self._listeners]
        if not all(are_closed):
            log.info("this kernel lets only root refuse new connections: clients connecting now may get a reset")
        if self._workers:
            end = time.monotonic() + QUEUE_S
            await asyncio.sleep(HANDSHAKE_S)
            while any(map(waiting, self._listeners)) and time.monotonic() < end:  # noqa: ASYNC110 - the kernel has no event
                await asyncio.sleep(0.01)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _fill(self, place: int | str) -> None:
        worker = await self._spawn(place)
        self._copies.remove(self._last_ready.get(place, 0))
        self._workers[place] = worker
        self._last_ready[place] = worker.pid
        self._send_certificates(worker)

    async def _spawn(self, place: int | str) -> SupervisedProcess:
        assert self._starter is not None
        grace_s = self.settings.server.drain_s + STOP_GRACE_S + KILL_AFTER_S
        try:
            process = await self._starter.start(ForkRequest(self._arguments(place), self._files(place), grace_s))
        except OSError as exc:
            raise WorkerFailed(f"no process could be started ({exc})") from None
        worker = SupervisedProcess(
            process,
            self.settings,
            name=place if isinstance(place, str) else "worker",
            certificates=None if isinstance(place, str) else self._certificates,
        )
        try:
            await worker.ready()
        except BaseException:
            self._forget(worker)
            self._copies.remove(worker.pid)
            raise
        return worker

    def _process_starter(self) -> ProcessStarter:
        modules = (*((WORKER_MODULE,) if self.count else ()), *((PART_MODULE,) if self.parts else ()))
        return ProcessStarter(modules, self._environment(), fds=self._files(0), log_to=self._log_to)

    def _files(self, place: int | str) -> list[int]:
        """The descriptors that a process inherits."""
        of_worker = [*(each.fileno() for each in self._listeners), self._buckets_fd]
        return [*(of_worker if isinstance(place, int) else ()), self._memory_fd, self._directory.lock_fd]

    def _arguments(self, place: int | str) -> list[str]:
        memory = ("--memory-fd", str(self._memory_fd))
        if isinstance(place, str):
            return ["background", place, *memory]
        alone = ("--alone",) if self.count == 1 else ()
        copies = ("--copies", str(self._copies.path), "--predecessor", str(self._last_ready.get(place, 0)))
        sockets = ("--place", str(place), "--listen-fds", *(str(each.fileno()) for each in self._listeners))
        return ["worker", *sockets, "--buckets-fd", str(self._buckets_fd), *memory, *copies, *alone]

    def _environment(self) -> Mapping[str, str]:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        return {
            **os.environ,
            METRICS: str(self._directory.path),
            "PYTHONPATH": path,
            host_memory.HOST: self._host,
        }

    async def _keep_running(self, place: int | str) -> None:
        """Keep one process running: replace it when it dies or the settings change."""
        pause_s = 0.0
        while True:
            worker = self._workers.get(place)
            if worker is None:
                await asyncio.sleep(pause_s)
                pause_s = min(max(0.1, pause_s * 2), LONGEST_PAUSE_S)
                try:
                    await self._fill(place)
                except WorkerFailed as exc:
                    log.error("process did not start", extra={"reason": str(exc), "again_in_s": pause_s})
                self._attend()
                continue
            match await self._until_changed(worker, place):
                case "reload":
                    await self._replace(place, worker)
                    continue
                case "hung":
                    self._give_up(worker)
                case "ended":
                    self._has_ended(worker)
            lived_s = time.monotonic() - worker.began
            log.error(f"{worker.name} died", extra={"worker": worker.pid, "lived_s": round(lived_s, 1)})
            del self._workers[place]
            self._attend()
            if lived_s > HEALTHY_S:
                pause_s = 0.0

    async def _until_changed(self, worker: SupervisedProcess, place: int | str) -> ProcessChange:
        reload = self._reload[place]
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(each) for each in (worker.ended(), worker.hung(self._attend), reload.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if reload.is_set():
            reload.clear()
            return "reload"
        return "ended" if worker.has_ended else "hung"

    def _attend(self) -> None:
        """Let the workers that respond accept from the sockets of those that do not."""
        workers = {place: self._workers.get(place) for place in range(self.count)}
        attended = [each for each in workers.values() if each is not None and each.responds]
        line = unattended_line([place for place, each in workers.items() if each not in attended])
        for worker in attended:
            worker.send(line)

    def _give_up(self, worker: SupervisedProcess) -> None:
        """Kill a process that does not respond. Its successor does not wait for its end, which the kernel can delay."""
        silent_s = worker.settings.server.worker_timeout_s
        log.error(f"{worker.name} does not respond: killing it", extra={"worker": worker.pid, "silent_s": silent_s})
        worker.kill()
        if self._scrape is not None:
            self._scrape.worker_hung()
        self._retire_soon(worker)

    async def _replace(self, place: int | str, old: SupervisedProcess) -> None:
        try:
            await self._fill(place)
        except WorkerFailed as exc:
            log.error("reload failed: keeping the old process and its settings", extra={"reason": str(exc)})
            self.settings, self._certificates = old.settings, old.certificates or self._certificates
            self._reloading.clear()
            return
        self._retire_soon(old)
        began = self._reloading.pop(place, None)
        if began is not None and not self._reloading:
            log.info("reloaded", extra={"took_s": round(time.monotonic() - began, 1), "processes": len(self._workers)})

    def _retire_soon(self, old: SupervisedProcess) -> None:
        self._retiring.add(old)
        self._tasks.start("retiring", lambda: self._retire(old), of=old.pid)

    async def _retire(self, old: SupervisedProcess) -> None:
        await old.stop()
        self._retiring.discard(old)
        self._has_ended(old)

    def _has_ended(self, worker: SupervisedProcess) -> None:
        if self._scrape is not None:
            self._scrape.worker_replaced()
        self._forget(worker)

    def _forget(self, worker: SupervisedProcess) -> None:
        """Leave a process that has ended out of the metrics of running ones."""
        if self._scrape is not None:
            self._scrape.worker_ended(worker.pid)

    def _serve_metrics(self, directory: Path) -> int:
        wanted = self.settings.metrics
        scrape = Scrape(directory)
        try:
            port = scrape.serve(wanted.host, wanted.port)
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise StartError(
                [
                    f"metrics.port: cannot listen on {wanted.host}:{wanted.port} ({reason}): choose another port, with "
                    "metrics.port in the settings or PENSTOCK_METRICS__PORT; 0 takes any that is free"
                ]
            ) from None
        self._scrape = scrape
        return port

    def _log_size(self) -> int:
        return self._log_to.stat().st_size if self._log_to is not None and self._log_to.exists() else 0

    def _log_since(self, size: int) -> str:
        """Return the last lines that workers logged since; empty if they log to standard error, where they are visible."""
        if self._log_to is None:
            return ""
        with self._log_to.open("rb") as written:
            written.seek(size)
            lines = written.read().decode("utf-8", "replace").splitlines()
        return f"; the end of {self._log_to}:\n" + "\n".join(lines[-15:])


def _leaf(settings: Settings, name: str) -> object:
    section, _, key = name.partition(".")
    return settings.tree[section][key]


# The listening sockets


def listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """One listening socket per worker, all on one port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # With SO_REUSEPORT two services could share a port by accident: first bind it without.
        with _bound(family, host, port, shared=False) as probe:
            port = probe.getsockname()[1]
        sockets = [_bound(family, host, port, shared=True) for _ in range(count)]
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise StartError(
            [
                f"server.port: cannot listen on {host}:{port} ({reason}): choose another port, with server.port in the "
                "settings, PENSTOCK_SERVER__PORT or, in development, --port"
            ]
        ) from None
    for listener in sockets:
        listener.listen(BACKLOG)
    return sockets


def _bound(family: int, host: str, port: int, *, shared: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


_SO_ATTACH_FILTER = 26
# A classic BPF program over the TCP header: drop packets with the SYN flag (byte 13, bit 1), pass all others.
_NO_SYN = b"".join(
    struct.pack("HBBI", *step)
    for step in ((0x30, 0, 0, 13), (0x45, 0, 1, 2), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
)


def refuse_new(listener: socket.socket) -> bool:
    """Refuse new connections; queued and half-open ones are kept. Returns whether the kernel allowed it.

    Closing a listening socket resets the connections in its queue, although their requests may already have arrived. There is
    no system call to stop listening and keep the queue, but a filter that drops every SYN has this effect. Some kernels allow
    it only for root.
    """
    program = ctypes.create_string_buffer(_NO_SYN, len(_NO_SYN))
    option = struct.pack("HP", len(_NO_SYN) // 8, ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
    except OSError:
        return False
    return True


def waiting(listener: socket.socket) -> int:
    """Return the number of queued connections: for a listening socket, that is the meaning of `tcpi_unacked`."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)
    return int(struct.unpack_from("I", info, 24)[0])
