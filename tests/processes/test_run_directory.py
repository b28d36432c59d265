"""The directory of a running service: removed after the last of its processes has ended, and never before."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.processes.run_directory import PREFIX, RunDirectory

# Opens a directory, starts a child that inherits its lock, prints the path and the child's id, and waits.
SUPERVISOR = """
import subprocess, sys
from proxy.processes.run_directory import RunDirectory

found = RunDirectory()
found.open()
child = subprocess.Popen(["sleep", "60"], pass_fds=[found.lock_fd])
print(found.path, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def supervisor(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def open_and_remove() -> None:
    found = RunDirectory()
    found.open()
    found.remove()


def test_directory_is_private_and_removed(temporary: Path) -> None:
    found = RunDirectory()
    found.open()
    assert found.path.parent == temporary
    assert found.path.stat().st_mode & 0o777 == 0o700
    (found.path / "metrics").write_text("1")
    found.remove()
    found.remove()
    assert not list(temporary.iterdir())


def test_directory_is_kept_while_one_of_its_processes_runs(supervisor: subprocess.Popen[str]) -> None:
    assert supervisor.stdout is not None
    path, pid = supervisor.stdout.readline().split()
    open_and_remove()
    assert Path(path).exists()
    supervisor.kill()
    supervisor.wait()
    open_and_remove()
    assert Path(path).exists()
    subprocess.run(["kill", "-9", pid], check=True)
    supervisor.stdout.read()  # ends with the child, which holds the other end
    open_and_remove()
    assert not Path(path).exists()


def test_only_directories_are_removed(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{PREFIX}file").write_text("")
    (temporary / f"{PREFIX}left").mkdir()
    open_and_remove()
    assert sorted(path.name for path in temporary.iterdir()) == ["elsewhere", f"{PREFIX}file", f"{PREFIX}link"]
