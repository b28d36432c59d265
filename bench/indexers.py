"""Other indexers that read the logs of the same stub chain: ponder (npm) and cryo (PyPI). They are installed on demand.

Ponder keeps one row per transfer and one per balance in the same Postgres, as its ERC-20 example does. Cryo writes logs to
Parquet files, without a database.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import machine, processes
from bench.loaders import BUILD
from bench.processes import StartFailed

PONDER, VIEM, HONO = "ponder@1.0.0", "viem@2.39.0", "hono@4.10.0"
CRYO = "cryo_python==0.3.0"
INSTALL_S, RUN_S = 600.0, 7200.0
READY_S = 0.1

# Runs an indexer: the working directory, the upstream, the database and the number of blocks. Returns its CPU seconds.
Run = Callable[[Path, str, str, int], float]


def timed(argv: Sequence[str], *, environment: Mapping[str, str], cwd: Path | None = None) -> float:
    """Run a program to its end and return its CPU seconds."""
    process = subprocess.Popen(
        argv, env={**os.environ, **environment}, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    output = process.stdout.read()
    process.stdout.close()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise StartFailed(f"{Path(argv[0]).name}: {output.decode(errors='replace')[-1000:]}")
    return used.ru_utime + used.ru_stime


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _install(name: str, argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise StartFailed(f"{name} cannot be installed: {(done.stdout + done.stderr).strip()[-300:]}")


_PONDER_CONFIG = """
import { createConfig } from "ponder";
import { http, parseAbi } from "viem";

export default createConfig({
  database: { kind: "postgres", connectionString: process.env.DATABASE_URL },
  networks: { mainnet: { chainId: 1, transport: http(process.env.UPSTREAM) } },
  contracts: {
    Token: {
      network: "mainnet",
      abi: parseAbi(["event Transfer(address indexed from, address indexed to, uint256 value)"]),
      startBlock: 1,
      endBlock: Number(process.env.LAST_BLOCK),
    },
  },
});
"""
_PONDER_SCHEMA = """
import { onchainTable, primaryKey } from "ponder";

export const transfer = onchainTable("transfer", (t) => ({
  id: t.text().primaryKey(),
  block: t.bigint().notNull(),
  transaction: t.hex().notNull(),
  contract: t.hex().notNull(),
  sender: t.hex().notNull(),
  recipient: t.hex().notNull(),
  amount: t.bigint().notNull(),
}));

export const balance = onchainTable("balance", (t) => ({
  holder: t.hex().notNull(),
  contract: t.hex().notNull(),
  amount: t.bigint().notNull(),
}), (table) => ({ pk: primaryKey({ columns: [table.holder, table.contract] }) }));
"""
_PONDER_HANDLERS = """
import { ponder } from "ponder:registry";
import { balance, transfer } from "ponder:schema";

ponder.on("Token:Transfer", async ({ event, context }) => {
  const { from, to, value } = event.args;
  const contract = event.log.address;
  await context.db.insert(transfer).values({
    id: event.id, block: event.block.number, transaction: event.transaction.hash, contract, sender: from, recipient: to,
    amount: value,
  });
  for (const [holder, change] of [[from, -value], [to, value]]) {
    await context.db.insert(balance).values({ holder, contract, amount: change })
      .onConflictDoUpdate((row) => ({ amount: row.amount + change }));
  }
});
"""
_PONDER_API = """
import { Hono } from "hono";

export default new Hono();
"""


def ponder(workdir: Path, upstream: str, database: str, blocks: int) -> float:
    """It has ended when its route `/ready` says so: then all past blocks are indexed."""
    home = BUILD / "ponder"
    if not (home / "node_modules" / "ponder").exists():
        home.mkdir(parents=True, exist_ok=True)
        (home / "package.json").write_text(json.dumps({"name": "indexer", "private": True, "type": "module"}))
        _install("ponder", ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), PONDER, VIEM, HONO])
    for name, text in {
        "ponder.config.ts": _PONDER_CONFIG,
        "ponder.schema.ts": _PONDER_SCHEMA,
        "src/index.ts": _PONDER_HANDLERS,
        "src/api/index.ts": _PONDER_API,
    }.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    port = processes.free_port()
    words = ("start", "--schema", "bench", "--port", str(port), "--hostname", "127.0.0.1")
    child = processes.start(
        "ponder",
        [str(home / "node_modules" / ".bin" / "ponder"), *words],
        cpus=os.sched_getaffinity(0),
        log=workdir / "ponder.log",
        env={
            "DATABASE_URL": database,
            "UPSTREAM": upstream,
            "LAST_BLOCK": str(blocks - 2),
            "PONDER_TELEMETRY_DISABLED": "true",
            "CI": "true",
        },
        cwd=home,
    )
    try:
        _wait_until_ready(child, f"http://127.0.0.1:{port}/ready")
        return sum(cpu_seconds(pid) for pid in machine.descendants(child.pid))
    finally:
        child.stop()


def _wait_until_ready(child: processes.Child, url: str) -> None:
    end = time.monotonic() + RUN_S
    while time.monotonic() < end:
        if fault := child.fault():
            raise StartFailed(f"ponder {fault}")
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(READY_S)
    raise StartFailed(f"ponder was not ready within {RUN_S:.0f} s")


# It leaves at once: threads that are still there can crash the interpreter while it ends.
_CRYO = """
import os
import sys

import cryo

upstream, folder, blocks = sys.argv[1:]
cryo.freeze("logs", blocks=[f"1:{blocks}"], rpc=upstream, output_dir=folder, chunk_size=1000, inner_request_size=16)
sys.stdout.flush()
os._exit(0)
"""


def cryo(workdir: Path, upstream: str, database: str, blocks: int) -> float:
    """Logs to Parquet files."""
    home = BUILD / "cryo"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        _install("cryo", [sys.executable, "-m", "venv", "--clear", str(home)])
        _install("cryo", [str(python), "-m", "pip", "install", "--quiet", CRYO])
        (home / "ready").touch()
    folder = workdir / "cryo"
    folder.mkdir(exist_ok=True)
    return timed([str(python), "-c", _CRYO, upstream, str(folder), str(blocks - 1)], environment={})


# The fastest first.
INDEXERS: Mapping[str, Run] = {"cryo": cryo, "ponder": ponder}
