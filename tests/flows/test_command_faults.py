"""No command prints a traceback, whatever it is given: each error is a line that says what is wrong."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from proxy import __main__ as command_line
from proxy import settings
from proxy.__main__ import COMMANDS, INTERNAL, OVERVIEW, main
from proxy.commands.certify import with_candidate
from proxy.commands.completion import _whole_parser
from proxy.commands.context import new_file
from proxy.commands.keys import _details
from proxy.errors import InvalidRequest
from tests.service import ROOT, until
from tests.shipped_tables import TABLES

ENVIRONMENT = {"DATABASE_URL": "postgresql://x@127.0.0.1:1/x", "PENSTOCK_KEYS__PEPPER": "p" * 40}


def leaves(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command without subcommands of its own, with its parser."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield words, parser
    for action in nested:
        for name, below in action.choices.items():
            yield from leaves(below, (*words, name))


# For files of up to 512 MiB, which captures are.
ROOM_BYTES = 2 << 30

# Commands that serve until they are stopped.
LASTING = frozenset({"dev", "serve", "mcp", "webhooks"})
LEAVES = {words: parser for words, parser in leaves(_whole_parser()) if words[0] not in INTERNAL}


def required(parser: argparse.ArgumentParser, value: str) -> list[str]:
    """Words for the required arguments of a command."""
    found: list[str] = []
    for action in parser._actions:
        given = str(next(iter(action.choices))) if action.choices else "1" if action.type is int else value
        if action.option_strings and action.required:
            found += [action.option_strings[-1], given]
        elif not action.option_strings and action.nargs not in ("?", "*"):
            found.append(given)
    return found


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def exit_code(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as exc:  # argparse
        return int(exc.code or 0)


def fails_in_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that cannot succeed, and return its errors."""
    code, errors = exit_code(words), capsys.readouterr().err
    assert code in (1, 2), (words, code, errors)
    assert errors, words
    assert "Traceback" not in errors
    assert "unexpected error" not in errors
    return errors


@contextmanager
def little_memory() -> Iterator[None]:
    """A file without an end is not read until the machine has no memory left."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("words", [words for words in LEAVES if "--config" in options_of(LEAVES[words])], ids=" ".join)
@pytest.mark.parametrize("file", ["missing.toml", "a-directory", "binary.toml", "number.toml", "endless.toml"])
def test_settings_file_that_cannot_be_used(
    words: tuple[str, ...], file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-directory").mkdir()
    (tmp_path / "binary.toml").write_bytes(b"\xff\x00")
    (tmp_path / "number.toml").write_text("server = 5\ndata_files = 5")
    (tmp_path / "endless.toml").symlink_to("/dev/zero")
    with little_memory():
        fails_in_words([*words, *required(LEAVES[words], "x"), "--config", str(tmp_path / file)], capsys)


@pytest.mark.parametrize("words", [words for words in LEAVES if "--data" in options_of(LEAVES[words])], ids=" ".join)
def test_without_a_database_the_error_says_what_to_configure(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    fails_in_words([*words, *required(LEAVES[words], "x"), "--data", str(tmp_path / "file" / "data")], capsys)


@pytest.mark.parametrize("file", ["missing/penstock.toml", "file/penstock.toml"])
def test_settings_are_not_written_where_there_is_no_directory(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "does not exist: create it" in fails_in_words(["init", str(tmp_path / file)], capsys)


def test_file_that_the_system_refuses_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr("proxy.commands.init.write_private", refuse)
    assert fails_in_words(["init", str(tmp_path / "x.toml")], capsys) == "penstock: /some/file: Permission denied\n"


@pytest.mark.parametrize("text", ["", "soon", "2027-13-01", "9" * 400])
def test_time_that_is_none_is_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--expires-at"):
        _details(argparse.Namespace(expires_at=text, owner=None, note=None))


@pytest.mark.parametrize("file", ["missing/report.html", "file/report.html", "a-directory", ""])
@pytest.mark.parametrize("words", [("trial",), ("certify", "http://127.0.0.1:1")], ids=" ".join)
def test_file_is_refused_before_the_work_for_it(
    words: tuple[str, ...], file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-directory").mkdir()
    (tmp_path / "file").write_text("")
    errors = fails_in_words(["upstreams", *words, "--html", str(tmp_path / file)], capsys)
    assert "argument --html: " in errors


@pytest.mark.parametrize("url", ["", "x", "ws://127.0.0.1:1", "[]", "é\u202e"])
def test_candidate_without_a_url_is_refused_before_it_is_called(url: str) -> None:
    with pytest.raises(InvalidRequest, match="must be an http or https URL"):
        with_candidate(settings.load(environ=ENVIRONMENT), TABLES, argparse.Namespace(url=url))


def line_with(words: tuple[str, ...], changed: argparse.Action, value: str) -> list[str]:
    """A command line whose arguments are plausible except for one."""
    found = list(words)
    for action in LEAVES[words]._actions:
        if action is changed:
            # With "=", a value that begins with a hyphen is not taken for an option.
            found.append(f"{action.option_strings[-1]}={value}" if action.option_strings else value)
        elif not action.option_strings and action.nargs != "?":
            found.append(str(next(iter(action.choices))) if action.choices else "1" if action.type is int else "x")
        elif action.option_strings and action.required:
            found += [action.option_strings[-1], "x"]
    return found


def arguments(kinds: Callable[[Any], bool]) -> list[Any]:
    """Every command with each argument whose type is of a kind. --config and --data have their own tests."""
    return [
        pytest.param(
            words, action, id=" ".join((*words, action.option_strings[-1] if action.option_strings else action.dest))
        )
        for words, parser in LEAVES.items()
        for action in parser._actions
        if words[0] not in LASTING and action.dest not in ("config", "data") and kinds(action.type)
    ]


def ends_in_words(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command with a hostile argument may succeed; if it fails, it says why."""
    code, errors = exit_code(line), capsys.readouterr().err
    assert code in (0, 1, 2), (line, code, errors)
    assert "Traceback" not in errors, line
    assert "unexpected error" not in errors, (line, errors)
    assert code == 0 or errors, line


@pytest.mark.parametrize(("words", "action"), arguments(lambda kind: kind in (Path, new_file)))
def test_file_that_cannot_be_used(
    words: tuple[str, ...],
    action: argparse.Action,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    (tmp_path / "endless").symlink_to("/dev/zero")
    # Even root cannot create a file in /sys.
    for value in ("missing/x", "file/x", "directory", "file", "binary", "", "x" * 300, "/sys/x"):
        ends_in_words(line_with(words, action, value), capsys)
    with little_memory():
        ends_in_words(line_with(words, action, "endless"), capsys)


@pytest.mark.parametrize(("words", "action"), arguments(lambda kind: kind is not None and kind not in (Path, new_file)))
def test_value_of_the_wrong_type(
    words: tuple[str, ...],
    action: argparse.Action,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for value in ("", "x", "-1", "1.5", "9" * 400, "nan", "inf", "é\u202e", "[]"):
        ends_in_words(line_with(words, action, value), capsys)


@pytest.mark.parametrize(
    "words",
    [words for words in LEAVES if words[0] not in LASTING and "--config" in options_of(LEAVES[words])],
    ids=" ".join,
)
def test_interrupt_ends_every_command_quietly(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database accepts the connection and says nothing, until the user has enough."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_KEYS__PEPPER", "p" * 40)
    # A shell starts its background jobs with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with silent_server(lambda: os.kill(os.getpid(), signal.SIGINT)) as port:
            monkeypatch.setenv("DATABASE_URL", f"postgresql://x@127.0.0.1:{port}/x")
            code = exit_code([*words, *required(LEAVES[words], "x")])
    finally:
        signal.signal(signal.SIGINT, before)
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert "unexpected error" not in errors, errors
    # A command that needs no database, or refuses its arguments first, has ended by itself.
    assert code in (0, 1, 2, 130), errors


def test_interrupt_while_a_command_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "proxy.commands.explain":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "proxy.commands.explain", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert main(["explain", "x"]) == 130
    assert capsys.readouterr().err == ""


@contextmanager
def silent_server(connected: Callable[[], None]) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                kept.append(listener.accept()[0])
                connected()

        kept: list[socket.socket] = []
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in kept:
                each.close()


async def test_interrupt_ends_a_command_quietly() -> None:
    """The database accepts the connection and says nothing, until the user has enough."""
    connected = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    env = {**os.environ, "DATABASE_URL": f"postgresql://x@127.0.0.1:{port}/x", "PENSTOCK_KEYS__PEPPER": "p" * 40}
    command = [sys.executable, "-m", "proxy", "accounts", "list"]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        await until(connected.is_set)
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.to_thread(process.communicate, timeout=20)
    finally:
        process.kill()
        server.close()
    assert b"Traceback" not in errors, errors
    assert process.returncode == 130


def test_overview_lists_every_command_with_its_own_words() -> None:
    subparsers = next(each for each in _whole_parser()._actions if isinstance(each, argparse._SubParsersAction))
    about = {choice.dest: choice.help for choice in subparsers._choices_actions}
    lines = [line for line in OVERVIEW.splitlines() if line.startswith("  ") and "{prog}" not in line]
    listed = dict(line.strip().split(maxsplit=1) for line in lines)
    assert listed == about
    assert set(listed) == set(COMMANDS) - INTERNAL


def test_mistyped_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acounts"]) == 2
    assert capsys.readouterr().err == "penstock: there is no command 'acounts': did you mean accounts?\n"


@pytest.mark.parametrize(
    ("words", "command", "message"),
    [
        (["keys", "creat"], "keys", "there is no action 'creat': did you mean create?"),
        (["keys", "zzz"], "keys", "argument ACTION: invalid choice: 'zzz'"),
        (
            ["keys", "create", "--account", "a", "--nmae", "b"],
            "keys create",
            "there is no option --nmae: did you mean --name?",
        ),
        (["migrate", "--database", "postgresql://x"], "migrate", "there is no option --database"),
        (["check", "more"], "check", "unrecognized arguments: more"),
    ],
)
def test_mistyped_words_of_a_command_are_answered_with_its_own_usage_and_the_nearest(
    words: list[str], command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 2
    usage, *_, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: python -m proxy {command} ")
    assert error.startswith(f"python -m proxy {command}: error: {message}")


def test_settings_file_is_found_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line._default_config() is None
    (tmp_path / "penstock.toml").write_text("colour = 1")
    assert "colour" in fails_in_words(["check"], capsys)
    (tmp_path / "other.toml").write_text("sound = 1")
    monkeypatch.setenv("PENSTOCK_CONFIG", "other.toml")
    assert "sound" in fails_in_words(["check"], capsys)
