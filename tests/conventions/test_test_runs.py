"""Tests that run in several processes are all counted, and no test fails for another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import second_look
from tests.conventions.source import ROOT

CONFTEST = """
from tests import forked_run
from tests.forked_run import pytest_runtestloop

def pytest_addoption(parser):
    forked_run.add_option(parser)
"""
MIXED = """
import os
import pytest

@pytest.fixture(scope="session")
def noted(tmp_path_factory):
    yield
    print("the fixture of the session has ended")

def test_passes(noted, tmp_path):
    (tmp_path / "file").write_text("")

def test_fails():
    print("a word from", "the test")
    assert [1, 2] == [1, 3]

@pytest.mark.skip(reason="not today")
def test_is_skipped():
    pass
"""


LEAVING = """
import gc, socket

def test_fails():
    opened = socket.socket()
    assert not opened

def test_is_innocent():
    gc.collect()
"""
# Fails in every run with several processes and passes alone.
UNSTEADY = """
def test_needs_to_be_alone(request):
    assert not request.config.getoption("--processes")
"""
DROPPING = """
import pytest
from tests import leftovers

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown():
    leftovers.drop()
"""


def run(directory: Path, *words: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run pytest over these files in a directory of their own."""
    for name, text in {"conftest": CONFTEST, **files}.items():
        (directory / f"{name}.py").write_text(text)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "--rootdir",
        str(directory),
        "-c",
        "/dev/null",
        *words,
        str(directory),
    ]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take a second to load
    return subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_reports_of_all_processes_are_counted_and_shown(tmp_path: Path) -> None:
    files = {f"test_{name}": MIXED for name in ("one", "two", "three")}
    done = run(tmp_path, "--processes", "2", "-p", "no:cacheprovider", **files)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "3 failed, 3 passed, 3 skipped" in done.stdout
    assert done.stdout.count("a word from the test") == 3
    assert done.stdout.count("At index 1 diff: 2 != 3") == 3
    assert done.stdout.count("the fixture of the session has ended") <= 2
    assert "SKIPPED [3]" in done.stdout or done.stdout.count("SKIPPED [1]") == 3


def test_files_run_in_several_processes_and_each_file_in_one(tmp_path: Path) -> None:
    text = """
import os, pathlib, time
MET = pathlib.Path(__file__).parent

def test_waits_for_the_other_file():
    (MET / f"{os.getpid()}.met").write_text("")
    end = time.monotonic() + 30
    while len([*MET.glob("*.met")]) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)

def test_is_in_the_same_process():
    assert (MET / f"{os.getpid()}.met").exists()
"""
    done = run(tmp_path, "--processes", "2", "-p", "no:cacheprovider", test_one=text, test_two=text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os._exit(7)", "exit status 7"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
    ids=["exits", "is killed", "is interrupted"],
)
def test_process_that_ends_early_fails_the_run(tmp_path: Path, code: str, said: str) -> None:
    """Its other tests have not run, so this must not look like one failed test."""
    text = f"import os\n\ndef test_ends():\n    {code}\n\ndef test_never_runs():\n    pass\n"
    done = run(tmp_path, "--processes", "2", "-p", "no:cacheprovider", test_one=text, test_two=MIXED)
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "test_one.py::test_ends" in done.stdout + done.stderr


def test_first_failure_ends_the_run_on_request(tmp_path: Path) -> None:
    done = run(tmp_path, "--processes", "1", "-x", "-p", "no:cacheprovider", test_one=MIXED, test_two=MIXED)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout


def test_failed_tests_are_known_to_the_next_run(tmp_path: Path) -> None:
    cache = ("-o", f"cache_dir={tmp_path / 'cache'}")
    run(tmp_path, "--processes", "2", *cache, test_one=MIXED, test_two=MIXED)
    again = run(tmp_path, "--processes", "0", "--last-failed", *cache)
    assert "2 failed" in again.stdout
    assert "passed" not in again.stdout


def test_test_after_a_failed_one_does_not_fail_for_what_that_left_open(tmp_path: Path) -> None:
    words = ("-W", "error", "-p", "no:cacheprovider")
    assert "2 failed" in run(tmp_path, *words, test_one=LEAVING, conftest="").stdout
    done = run(tmp_path, *words, test_one=LEAVING, conftest=DROPPING)
    assert "1 failed, 1 passed, 1 error" in done.stdout
    assert "ERROR at teardown of test_fails" in done.stdout


def test_test_that_passes_only_alone_is_forgiven_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(UNSTEADY)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    words = ["-q", "--rootdir", str(tmp_path), "-c", "/dev/null", "--processes", "2", str(tmp_path)]
    names = tmp_path / "unsteady.txt"
    assert second_look.main(words, names) == pytest.ExitCode.OK
    assert names.read_text() == "test_it.py::test_needs_to_be_alone\n"
    assert second_look.main(words, names) == pytest.ExitCode.TESTS_FAILED
    names.unlink()
    assert second_look.main(words, names) == pytest.ExitCode.OK
