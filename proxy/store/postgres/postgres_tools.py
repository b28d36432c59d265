"""Backups of the database with Postgres' own programs, pg_dump and pg_restore.

A program of an older Postgres cannot read a newer server, and a newer one may write what an older server does not understand.
So the programs of the server's own version are used where they are installed, and otherwise those of the next newer one.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from proxy.errors import StartError
from proxy.settings import environment

# Debian keeps each version in a directory of its own.
_DEBIAN = Path("/usr/lib/postgresql")
_MAJOR = re.compile(r"\(PostgreSQL\) (\d+)")
_RECORDS = "schema_migrations"


@dataclass(frozen=True, slots=True)
class PostgresTools:
    """The programs of one Postgres version."""

    directory: Path
    major: int

    def dump(self, url: str, file: Path) -> None:
        """Write a consistent copy of the database. Rows that need not survive a crash are left out."""
        self._run("pg_dump", "--format=custom", "--no-unlogged-table-data", f"--file={file}", url=url)

    def restore(self, url: str, file: Path) -> None:
        """Fill an empty database, completely or not at all."""
        words = ("--exit-on-error", "--single-transaction", "--no-owner", "--no-privileges")
        self._run("pg_restore", *words, str(file), url=url)

    def migrations(self, file: Path) -> list[str]:
        """The migrations that are recorded in a backup."""
        text = self._run("pg_restore", "--data-only", f"--table={_RECORDS}", "--file=-", str(file))
        _, header, rows = text.partition(f"COPY public.{_RECORDS} ")
        if not header:
            raise StartError([f"{file}: is not a backup of a Penstock database"])
        return sorted(line.split("\t")[0] for line in rows.partition("\\.")[0].splitlines()[1:])

    def _run(self, program: str, *words: str, url: str = "") -> str:
        bare, secret = without_password(url)
        target = [f"--dbname={bare}"] if url else []
        done = subprocess.run(
            [self.directory / program, *target, *words],
            capture_output=True,
            text=True,
            errors="replace",
            env={**environment(), **secret},
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise StartError([f"{program} failed: {reason[0].removeprefix(f'{program}: ')}"])
        return done.stdout


def without_password(url: str) -> tuple[str, Mapping[str, str]]:
    """The URL for a command line, which every user of the machine can read, and the password as a variable."""
    password = urlsplit(url).password
    if password is None:
        return url, {}
    return url.replace(f":{password}@", "@", 1), {"PGPASSWORD": unquote(password)}


def tools_for(server: int, places: Iterator[Path]) -> PostgresTools:
    """The installed programs that fit a server best. Raises StartError if none does."""
    candidates = [PostgresTools(place, major) for place in places if (major := _major(place)) is not None]
    fitting = sorted((tools for tools in candidates if tools.major >= server), key=lambda tools: tools.major)
    if fitting:
        return fitting[0]
    older = f"; pg_dump {max(tools.major for tools in candidates)} is too old" if candidates else ""
    raise StartError(
        [f"the server is Postgres {server}{older}: on Debian, run apt-get install postgresql-client-{server}"]
    )


def installed() -> Iterator[Path]:
    """The directories that may contain the programs."""
    yield from (Path(place) for place in os.get_exec_path() if place)
    yield from sorted(_DEBIAN.glob("*/bin"))


def _major(place: Path) -> int | None:
    program = place / "pg_dump"
    if not os.access(program, os.X_OK) or not os.access(place / "pg_restore", os.X_OK):
        return None
    # Debian's /usr/bin/pg_dump is a script that chooses a version, and fails without one.
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return int(named[1]) if (named := _MAJOR.search(said)) else None
