"""Output of commands: colours and progress on a terminal, plain text in a pipe."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout

import pytest

from proxy.commands import output, progress
from proxy.core.fleet import STATES
from tests.service import ROOT, until

ROWS = [{"part": "backup", "state": "up"}, {"part": "node", "state": "failed"}]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def print_rows() -> None:
    output.rows(ROWS, ("part", "state"), as_json=False)


def test_states_have_colours_on_a_terminal(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        print_rows()
    assert terminal.getvalue().splitlines() == [
        "\x1b[1mpart    state\x1b[0m",
        "backup  \x1b[32mup    \x1b[0m",
        "node    \x1b[31mfailed\x1b[0m",
    ]


def test_text_in_a_pipe_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows()
    assert capsys.readouterr().out == "part    state\nbackup  up\nnode    failed\n"


def test_user_can_switch_colours_off(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stdout(terminal):
        print_rows()
    assert "\x1b" not in terminal.getvalue()


def test_every_state_of_an_upstream_has_a_colour() -> None:
    assert {*STATES} <= output.COLOURS.keys()


async def test_line_is_drawn_again_while_another_program_runs(terminal: Terminal) -> None:
    with redirect_stdout(terminal), progress.ticking(lambda: "writing"):
        await until(lambda: terminal.getvalue().count("writing") >= 2)
    assert terminal.getvalue().startswith("\r\x1b[Kwriting, ")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_pipe_gets_a_changed_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    now: Callable[[], float] = lambda: clock  # noqa: E731
    monkeypatch.setattr(time, "monotonic", now)
    shown = progress.Progress()
    for clock, share in ((101.0, 40), (104.9, 40), (105.0, 50), (109.0, 60), (110.0, 60), (115.0, 60), (120.0, 70)):  # noqa: B007
        shown.show(f"[==  ] {share} %", f"{share} %")
    # Not the same line twice.
    assert capsys.readouterr().out == "50 %\n60 %\n70 %\n"


def test_progress_does_not_mix_with_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = progress.Progress(shown=False)
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    shown.show("50 %")
    shown.close()
    assert capsys.readouterr().out == ""


def test_help_imports_nothing_that_it_does_not_need() -> None:
    """The list of commands must appear at once: what it imports decides how long it takes."""
    code = "import sys; from proxy.__main__ import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {*done.stderr.split()}
    assert not loaded & {"asyncio", "aiohttp", "asyncpg", "msgspec", "orjson", "importlib.resources", "tempfile", "ssl"}
