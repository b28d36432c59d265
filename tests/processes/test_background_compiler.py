"""Compiling beside a running service: only where it is wanted and possible, and never beyond the end of the service."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest

from proxy import compiled
from proxy.processes import background_compiler
from proxy.processes.background_compiler import compile_once
from tests.service import children, until

# On a busy machine a process of the lowest priority may not run at all.
AT_ONCE = background_compiler.COMMAND[3:]
IN_USE = pytest.mark.skipif(compiled.in_use(), reason="the hot path is compiled already")


async def test_nothing_is_compiled_if_the_sources_are_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(compiled.SOURCE_ONLY, "1")
    assert not await compile_once()
    assert not caplog.records


@IN_USE
async def test_without_a_compiler_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(compiled.SOURCE_ONLY, raising=False)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(background_compiler, "COMMAND", AT_ONCE)
    is_made = compiled.Finder(compiled.directory()).is_whole()
    with caplog.at_level(logging.INFO, "penstock.compiler"):
        assert await compile_once() == is_made
    (line,) = caplog.records
    assert is_made or "no-such-compiler is not on PATH" in line.__dict__["reason"]


@IN_USE
async def test_compiler_ends_with_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled.Finder(compiled.directory()).is_whole():
        pytest.skip("nothing is left to compile")
    monkeypatch.delenv(compiled.SOURCE_ONLY, raising=False)
    monkeypatch.setattr(background_compiler, "COMMAND", AT_ONCE)

    def compilers() -> list[int]:
        return [pid for pid, line in children(os.getpid()) if "proxy compile" in line.replace("\0", " ")]

    task = asyncio.get_running_loop().create_task(compile_once())
    await until(lambda: bool(compilers()) or task.done())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not compilers())
