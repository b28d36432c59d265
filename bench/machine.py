"""The machine: the layout of cores, CPU and memory use from /proc, and the facts in the report."""

import contextlib
import glob
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from proxy import compiled


@dataclass(frozen=True, slots=True)
class Layout:
    """The role of each core: one for the service, another for load and stub, however many there are."""

    service: tuple[int, ...]
    load: int
    stub: int
    text: str


def layouts() -> tuple[Layout, Layout | None]:
    """Return the usual layout, and the one for two workers or None if there are fewer than four separate cores."""
    cores = _separate_cores()
    if len(cores) == 1:
        only = cores[0]
        return Layout((only,), only, only, f"ONE core ({only}) for everything: ratios mean little here"), None
    usual = Layout((cores[0],), cores[1], cores[1], f"service on core {cores[0]}, load and stub on core {cores[1]}")
    if len(cores) < 4:
        return usual, None
    a, b, c, d = cores[:4]
    return usual, Layout((a, b), c, d, f"two workers on cores {a} and {b}, load on {c}, stub on {d}")


def _separate_cores() -> list[int]:
    """One CPU per physical core, so that service and load never share one as hyperthreads."""
    chosen: list[int] = []
    seen: set[str] = set()
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            chosen.append(cpu)
    return chosen


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard limit (children inherit it) and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def listeners(port: int) -> list[int]:
    """The processes that hold a listening socket on this port: a gateway's workers, not its database."""
    inodes = _listening_inodes(port)
    found: set[int] = set()
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in inodes:
                found.add(int(link.split("/")[2]))
    return sorted(found)


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(table).splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and int(cells[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{cells[9]}]")
    return inodes


def descendants(pid: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for stat in glob.glob("/proc/[0-9]*/stat"):
        fields = _read(stat).rsplit(")", 1)[-1].split()
        if fields:
            parents.setdefault(int(fields[1]), []).append(int(stat.split("/")[2]))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def pin(pid: int, cpus: Iterable[int]) -> None:
    """Pin every thread of a running process; affinity set on the process affects only its first thread."""
    wanted = set(cpus)
    for task in glob.glob(f"/proc/{pid}/task/*"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.rsplit("/", 1)[1]), wanted)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time used so far, from the scheduler's nanosecond count (10 ms ticks are too coarse)."""
    total = 0
    for pid in pids:
        for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):
            total += int((_read(path) or "0").split()[0])
    return total / 1e9


def resident_bytes(pids: Iterable[int]) -> int:
    """Total resident memory of the processes."""
    return _memory(pids, "VmRSS")


def _memory(pids: Iterable[int], name: str) -> int:
    total = 0
    for pid in pids:
        match = re.search(rf"{name}:\s+(\d+) kB", _read(f"/proc/{pid}/status"))
        total += int(match.group(1)) * 1024 if match else 0
    return total


def forget_peaks(pids: Iterable[int]) -> None:
    """Start to measure the peak of each process's resident memory (proc_pid_clear_refs(5))."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pids: Iterable[int]) -> int:
    """Total of the peaks of resident memory since `forget_peaks`."""
    return _memory(pids, "VmHWM")


def be_idle(pid: int) -> None:
    """Let every thread of a process run only while nothing else wants its core."""
    for task in glob.glob(f"/proc/{pid}/task/*"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(task.rsplit("/", 1)[1]), os.SCHED_IDLE, os.sched_param(0))


def core_times(cpu: int) -> tuple[int, int]:
    """Busy and total ticks of one core since boot; the difference of two readings gives its utilisation."""
    for line in _read("/proc/stat").splitlines():
        name, *ticks = line.split()
        if name == f"cpu{cpu}":
            values = [int(tick) for tick in ticks[:8]]
            return sum(values) - values[3] - values[4], sum(values)
    return 0, 0


def facts(layout: Layout) -> dict[str, object]:
    """Everything a reader needs to judge the figures."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "layout": layout.text,
        "load_average_before": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "python_pgo": built_with_pgo(),
        "hot_path": "compiled" if compiled.in_use() else "from its sources",
        "packages": {name: _version(name) for name in ("aiohttp", "uvloop", "orjson", "msgspec")},
        "baselines": {"nginx": _tool("nginx", "-v"), "haproxy": _tool("haproxy", "-v"), "wrk": _tool("wrk", "-v")},
    }


def built_with_pgo() -> bool:
    """Whether this interpreter was built with profile-guided optimisation: worth about 10 % of a small call.

    Distributions build with a custom make target that leaves no trace in the configuration.
    """
    is_of_distribution = sys.base_prefix == "/usr"
    return is_of_distribution or "--enable-optimizations" in str(sysconfig.get_config_var("CONFIG_ARGS"))


def _cpu_model() -> str:
    match = re.search(r"^(?:model name|Model|CPU part)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match.group(1) if match else "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _tool(name: str, flag: str) -> str:
    path = find_tool(name)
    if path is None:
        return "not installed"
    done = subprocess.run([path, flag], capture_output=True, text=True, check=False)
    match = re.search(r"\d+\.\d+[\w.+~-]*", done.stdout + done.stderr)
    return match.group(0) if match else "unknown"


def find_tool(name: str) -> str | None:
    """Find a program. Debian installs servers in /usr/sbin, which is not on an ordinary user's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin")


def _read(path: str) -> str:
    """Read a file, or return an empty string: the process may have ended."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
