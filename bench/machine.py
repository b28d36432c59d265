"""What the machine is and what its processes use: the layout of cores, /proc, and the facts a report must state."""

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
    """Which core does what. One core for the service and another for load and stub, however many there are."""

    service: tuple[int, ...]
    load: int
    stub: int
    text: str


def layouts() -> tuple[Layout, Layout | None]:
    """The usual layout, and the one for two workers: None where four separate cores are not to be had."""
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
    """One CPU per physical core: two hyperthreads of one core would make service and load share it."""
    chosen: list[int] = []
    seen: set[str] = set()
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            chosen.append(cpu)
    return chosen


def raise_file_limit() -> int:
    """Lifts the soft limit on open files to the hard one (children inherit it) and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def listeners(port: int) -> list[int]:
    """The processes that hold a listening socket on this port: a gateway's workers, and not its database."""
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
    """A process and everything below it."""
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
    """Moves every thread of a running process: affinity set on the process alone reaches only its first."""
    wanted = set(cpus)
    for task in glob.glob(f"/proc/{pid}/task/*"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.rsplit("/", 1)[1]), wanted)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time used so far, from the scheduler's own count in nanoseconds (ticks of 10 ms are too coarse here)."""
    total = 0
    for pid in pids:
        for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):
            total += int((_read(path) or "0").split()[0])
    return total / 1e9


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of some processes together."""
    total = 0
    for pid in pids:
        match = re.search(r"VmRSS:\s+(\d+) kB", _read(f"/proc/{pid}/status"))
        total += int(match.group(1)) * 1024 if match else 0
    return total


def core_times(cpu: int) -> tuple[int, int]:
    """(busy, all) ticks of one core since boot; two readings give how busy it was between them."""
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
    """Whether this interpreter was built with profile-guided optimisation: worth about 10 % of the small call.

    Distributions do so by a target of their own, which leaves no trace in the configuration.
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
    """A program's path; Debian keeps servers in /usr/sbin, which an ordinary user's PATH lacks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin")


def _read(path: str) -> str:
    """A file's text, or nothing: a process may be gone by the time it is looked at."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
