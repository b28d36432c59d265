"""The file in which `upstreams certify --resume FILE` keeps what it has found, to go on after it was ended.

The file is written about every second, as a whole, and gets its name when it is whole. A process that is killed loses what it
has found since; the next one makes these reads again, and the report counts each read once. URLs of upstreams contain keys, so
the file has digests of them.
"""

from __future__ import annotations

import os
import time
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from proxy.commands.capture_file import MOST_BYTES as MOST_CAPTURED
from proxy.core.trials import MethodTrial, Trial
from proxy.core.usage import BUCKETS
from proxy.errors import StartError
from proxy.settings.given_files import read_bytes

VERSION: Final = 1
SAVE_S: Final = 1.0
_NOT_ONE: Final = "is not a file of `penstock upstreams certify --resume`: name another one"


class Comparison(msgspec.Struct, frozen=True):
    """Identifies the comparison. A file of another one is not continued."""

    network: str
    against: str
    candidate: str
    calls: str

    @classmethod
    def of(cls, network: str, urls: tuple[str, str], calls: Path | None) -> Comparison:
        """`urls`: of the upstream in use, and of the candidate. `calls`: the file that the reads are taken from."""
        against, candidate = (_digest(url.encode()) for url in urls)
        return cls(network, against, candidate, "" if calls is None else _digest(read_bytes(calls, MOST_CAPTURED)))


class CertifyState(msgspec.Struct, forbid_unknown_fields=True):
    # The version of the format.
    penstock_certify: int
    of: Comparison
    # The calls that were dealt with, of those that reads are taken from, and the reads that were made.
    position: int = 0
    reads: int = 0
    skipped: int = 0
    methods: dict[str, MethodTrial] = {}


_STATE = msgspec.json.Decoder(CertifyState)


class CertifyProgress:
    """`path`: None if nothing is kept."""

    def __init__(self, path: Path | None, of: Comparison) -> None:
        self._path = path
        self._state = CertifyState(VERSION, of)
        self._saved_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<CertifyProgress {self.reads} reads>"

    @property
    def position(self) -> int:
        return self._state.position

    @property
    def reads(self) -> int:
        return self._state.reads

    def load(self) -> None:
        """Go on where the last process ended, if there is a file."""
        if self._path is None or not self._path.exists():
            return
        try:
            state = _STATE.decode(read_bytes(self._path))
        except OSError as exc:
            raise StartError([f"{self._path}: cannot be read: {exc.strerror}"]) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise StartError([f"{self._path}: {_NOT_ONE}"]) from None
        if state.penstock_certify != VERSION or not _is_sound(state):
            raise StartError([f"{self._path}: {_NOT_ONE}"])
        for name in Comparison.__struct_fields__:
            if getattr(state.of, name) != getattr(self._state.of, name):
                raise StartError([f"{self._path}: is of another comparison ({name}): remove it, or name another file"])
        self._state = state

    def resume(self, trial: Trial) -> None:
        trial.add({"skipped": self._state.skipped, "methods": msgspec.to_builtins(self._state.methods)})

    def read(self, position: int, trial: Trial) -> None:
        """A read was made, of the call at this position."""
        self._state.position = position
        self._state.reads += 1
        if time.monotonic() - self._saved_at >= SAVE_S:
            self.save(trial)

    def save(self, trial: Trial) -> None:
        self._saved_at = time.monotonic()
        if self._path is None:
            return
        self._state.skipped, self._state.methods = trial.skipped, trial.methods
        part = self._path.with_name(self._path.name + ".part")
        with part.open("wb") as file:
            file.write(msgspec.json.encode(self._state) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._path)


def _is_sound(state: CertifyState) -> bool:
    counts = [state.position, state.reads, state.skipped]
    for each in state.methods.values():
        if len(each.ours) != BUCKETS or len(each.theirs) != BUCKETS:
            return False
        counts += [*each.outcomes.values(), *each.members.values(), *each.ours, *each.theirs]
        counts += [each.our_cost, each.their_cost]
    return min(counts) >= 0


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
