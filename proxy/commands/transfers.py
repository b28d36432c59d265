"""`transfers export`: write the history of a network to a CSV or Parquet file.

All rows belong to one state of the index, and ranges of blocks are written one after the other, so that the memory does not
grow with the file. The file gets its name when it is whole.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from proxy.chains.evm.address import checksum
from proxy.commands import context
from proxy.commands.index import add_blocks, network_of
from proxy.commands.progress import Progress, duration
from proxy.core.iso_time import iso_of_unix
from proxy.core.range_size import RangeSize
from proxy.core.transfer_history import ERC721, ERC1155, NAMES, OF_LOGS, has_failed, index_of
from proxy.errors import StartError
from proxy.store.postgres import transfers
from proxy.store.postgres.index_databases import IndexDatabases
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection

COLUMNS = (
    *("block_number", "block_hash", "timestamp", "tx_hash", "log_index", "category", "from", "to", "contract"),
    *("token_id", "value", "status"),
)
NUMBERS = frozenset({"block_number", "log_index"})


class RowWriter(Protocol):
    def write(self, rows: Sequence[tuple[Any, ...]]) -> None: ...


def register(commands: Any) -> None:
    parser = commands.add_parser("transfers", help="export the history of transfers to a file")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser("export", help="write the transfers of a range of blocks to a file")
    context.add_arguments(export)
    add_blocks(export, last="the newest of the index", first=0)
    export.add_argument("--format", choices=("csv", "parquet"), default="csv", help="format of the file (default: csv)")
    export.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file; it must not exist")
    export.set_defaults(run=lambda args: asyncio.run(run(args)))


async def run(args: argparse.Namespace) -> int:
    if args.last is not None and args.first > args.last:
        raise StartError([f"--to {args.last}: must not be below --from {args.first}"])
    if args.output.exists():
        raise StartError([f"--output {args.output}: exists already; choose another name"])
    async with context.opened(args) as (settings, main):
        network = network_of(context.tables_of(settings), args.chain)
        indexes = IndexDatabases.of(settings, main, application="penstock-export")
        await indexes.open()
        try:
            async with (
                indexes.pool_of(network.id).connection(within_s=PATIENT_S) as connection,
                connection.transaction(isolation="repeatable_read", readonly=True),
            ):
                indexed = await transfers.index_block(connection, network.id)
                if indexed is None:
                    raise StartError([f"--chain {args.chain}: {network.id} is not indexed"])
                number, newest = indexed
                last = newest if args.last is None else min(args.last, newest)
                count = await _export(connection, number, args, last)
        finally:
            await indexes.close()
    print(f"{count:,} transfers of {network.id}, blocks {args.first} to {last}, written to {args.output}")
    return 0


async def _export(connection: DatabaseConnection, network: int, args: argparse.Namespace, last: int) -> int:
    bar, size, count, first = Progress(), RangeSize(), 0, args.first
    with _opened(args.output, args.format) as writer:
        while first <= last:
            end = min(first + size.blocks - 1, last)
            rows = await transfers.exported(connection, network, first, end)
            writer.write([_row(row) for row in rows])
            size.read(end - first + 1, len(rows))
            count, first = count + len(rows), end + 1
            share = (first - args.first) / (last - args.first + 1)
            left = duration(bar.took_s / share - bar.took_s)
            rate = count / max(bar.took_s, 0.001)
            bar.show(f"{share:.0%}  block {end:,}  {count:,} transfers  {rate:,.0f}/s  {left} left")
    bar.close()
    return count


@contextmanager
def _opened(path: Path, kind: str) -> Iterator[RowWriter]:
    """A writer to a file that gets its name at the end."""
    part = path.with_name(path.name + ".part")
    try:
        if kind == "csv":
            with part.open("w", newline="", encoding="utf-8") as file:
                yield CsvRows(file)
        else:
            with ParquetRows(part) as writer:
                yield writer
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


class CsvRows:
    def __init__(self, file: Any) -> None:
        self._writer = csv.writer(file)
        self._writer.writerow(COLUMNS)

    def __repr__(self) -> str:
        return "<CsvRows>"

    def write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self._writer.writerows(rows)


class ParquetRows:
    """Values are text, as in the API: they have up to 256 bits."""

    def __init__(self, path: Path) -> None:
        try:
            self._arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ImportError:
            raise StartError(
                ["--format parquet: needs pyarrow; install it with `pip install penstock[export]`"]
            ) from None
        text, number = self._arrow.string(), self._arrow.int64()
        self._schema = self._arrow.schema([(name, number if name in NUMBERS else text) for name in COLUMNS])
        self._writer = parquet.ParquetWriter(str(path), self._schema, compression="zstd")

    def __repr__(self) -> str:
        return "<ParquetRows>"

    def __enter__(self) -> ParquetRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            columns = [list(column) for column in zip(*rows, strict=True)]
            self._writer.write_table(self._arrow.table(columns, schema=self._schema))


def _row(row: Any) -> tuple[Any, ...]:
    category = row["category"]
    return (
        row["block"],
        "0x" + row["hash"].hex(),
        iso_of_unix(row["time"]),
        "0x" + row["transaction"].hex(),
        index_of(row["place"]) if category in OF_LOGS else None,
        NAMES[category],
        checksum(row["sender"]),
        checksum(row["recipient"]) if row["recipient"] else None,
        checksum(row["contract"]) if row["contract"] else None,
        str(transfers.value_of(row["token_id"])) if category in (ERC721, ERC1155) else None,
        str(transfers.value_of(row["amount"])),
        "failed" if has_failed(category, row["place"]) else "included",
    )
