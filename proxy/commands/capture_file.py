"""Files of captured calls: `capture` writes them; `replay` and `upstreams certify` read them.

The first line is a header with the version of the format. Each further line is a call: milliseconds after the beginning,
network, method and params. There is nothing else in it: no account, key, address or header of a client.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from proxy.errors import StartError
from proxy.settings.given_files import read_bytes

VERSION: Final = 1
# Bounds of what a command reads into memory.
MOST_CALLS: Final = 1_000_000
MOST_BYTES: Final = 512 << 20
# A capture takes an hour at most.
LONGEST_MS: Final = 86_400_000.0
_NOT_ONE = "is not a file of captured calls: write one with `penstock capture FILE`"


class CapturedCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`at_ms`: its arrival, after the beginning of the capture."""

    at_ms: float
    network: str
    method: str
    params: msgspec.Raw

    @property
    def size(self) -> int:
        """About the bytes of its line."""
        return len(self.params) + len(self.network) + len(self.method) + 64


class CaptureHeader(msgspec.Struct, frozen=True):
    # The version of the format.
    penstock_capture: int
    began_at: str
    calls: int


_HEADER = msgspec.json.Decoder(CaptureHeader)
_CALL = msgspec.json.Decoder(CapturedCall)


def write_capture(path: Path, began_at: str, calls: Iterable[CapturedCall]) -> None:
    """Write a file that gets its name when it is whole. The calls are sorted by their arrival."""
    ordered = sorted(calls, key=lambda call: call.at_ms)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            for each in (CaptureHeader(VERSION, began_at, len(ordered)), *ordered):
                file.write(msgspec.json.encode(each) + b"\n")
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def read_capture(path: Path, network: str | None = None) -> list[CapturedCall]:
    """The calls of a file, all or those of one network."""
    try:
        lines = read_bytes(path, MOST_BYTES).splitlines()
    except OSError as exc:
        advice = ": capture for a shorter time" if exc.errno == errno.EFBIG else ""
        raise StartError([f"{path}: cannot be read: {exc.strerror}{advice}"]) from None
    _check_header(path, lines[0] if lines else b"")
    if len(lines) > MOST_CALLS + 1:
        raise StartError([f"{path}: has more than {MOST_CALLS:,} calls: capture for a shorter time"])
    calls = [call for call in _calls(path, lines) if network in (None, call.network)]
    if not calls:
        raise StartError([f"{path}: has no calls{f' of {network}' if network else ''}"])
    return calls


def _check_header(path: Path, line: bytes) -> None:
    try:
        header = _HEADER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise StartError([f"{path}, line 1: {_NOT_ONE}"]) from None
    if header.penstock_capture != VERSION:
        raise StartError(
            [
                f"{path}, line 1: is of version {header.penstock_capture}, and this Penstock reads version {VERSION}: "
                "capture again, or use the Penstock that wrote it"
            ]
        )


def _calls(path: Path, lines: list[bytes]) -> Iterator[CapturedCall]:
    before_ms = 0.0
    for number, line in enumerate(lines[1:], 2):
        try:
            call = _CALL.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise StartError([f"{path}, line {number}: {exc}"]) from None
        except RecursionError:
            raise StartError([f"{path}, line {number}: is nested too deeply"]) from None
        if not before_ms <= call.at_ms <= LONGEST_MS:
            raise StartError(
                [f"{path}, line {number}: its time must not be before that of the last line, nor after a day"]
            )
        before_ms = call.at_ms
        yield call
