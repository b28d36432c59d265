"""`doctor`: measure an upstream from outside, and write its [[upstreams]] block.

It reports what a client would see: the chain, latency, the newest block, methods, the largest batch, the widest range of logs,
how far back state is served, and WebSockets. An upstream of a family that is a data file is asked as that file says. The number
of calls is bounded: each measurement tries a short list of sizes in ascending order and stops at the first that is refused. It
never tries how many calls per second are allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from proxy import settings
from proxy.chains.families import READERS, family_of
from proxy.chains.lookups import Lookup, LookupCall, Values, text_of
from proxy.chains.registry import Network
from proxy.commands import output
from proxy.commands.chains import route_reply
from proxy.commands.progress import Progress
from proxy.core.data_bounds import BoundSearch
from proxy.dev.seed import write_private
from proxy.errors import InvalidRequest, StartError
from proxy.settings.given_files import read_bytes
from proxy.settings.masking import masked_value
from proxy.wire.no_redirects import no_redirects

COLUMNS = ("check", "result", "note")
REPLY_S = 15.0
# The most calls of one run, batches counted by their items: 1 + 5 + 1 + 14 methods + 182 in batches + 8 + 30, with room.
MOST_CALLS = 250
LATENCY_CALLS = 5
BATCHES = (2, 10, 20, 50, 100)
LOG_RANGES = (10, 100, 500, 1_000, 2_000, 5_000, 10_000, 100_000)
# Calls of the search for the oldest state: 25 are enough for a chain of a billion blocks.
MOST_SEARCHED = 30
NO_ADDRESS = "0x000000000000000000000000000000000000dEaD"
METHOD_NOT_FOUND = -32601
_NO_METHOD = (
    "not found",
    "not supported",
    "unsupported",
    "does not exist",
    "not available",
    "not whitelisted",
    "not allowed",
)
_RATE_HEADERS = ("x-ratelimit-limit", "ratelimit-limit")


def register(commands: Any) -> None:
    about = "measure an upstream from outside, and write its [[upstreams]] block"
    parser = commands.add_parser(
        "doctor",
        help=about,
        description=f"{about.capitalize()}. Makes at most {MOST_CALLS} calls. Exits with 1 if it cannot be used.",
    )
    parser.add_argument("url", metavar="URL", help="an http or https URL, or PROVIDER://KEY with --network")
    parser.add_argument("--key", metavar="KEY", help="sent as Authorization: Bearer")
    parser.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="a header of each call; repeatable"
    )
    parser.add_argument(
        "--network",
        metavar="NAME",
        help="the network that it must serve, such as CHAIN/NETWORK; required for families other than EVM and Solana",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="add the block to this settings file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda args: asyncio.run(_run(args)))


class Refused(Exception):
    """The upstream answers with an error. `code`: of JSON-RPC, or the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_no_method(self) -> bool:
        return self.code == METHOD_NOT_FOUND or any(words in str(self).lower() for words in _NO_METHOD)


class Patient:
    """The upstream under examination. Counts its calls."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        self._session = session
        self._url = url
        self._headers = dict(headers)
        self.calls = 0
        self.limited = 0
        self.rate: float | None = None

    def __repr__(self) -> str:
        return f"<Patient after {self.calls} calls>"

    async def call(self, method: str, *params: Any) -> Any:
        reply = await self._send({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, 1)
        return _result(reply)

    async def ask(self, call: LookupCall, values: Values) -> Values:
        """The values that a call of a lookup reads from its result."""
        method, given = call.with_values(values)
        params = json.loads(given)
        if " " not in method:
            reply = await self._send({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, 1)
            return call.values_in(json.dumps(_result(reply)).encode())
        self.calls += 1
        try:
            status, record = await route_reply(self._session, self._url, method, params, self._headers)
        except ValueError:
            raise Refused(0, f"its reply to {method} is not JSON") from None
        if record is None:
            raise Refused(status, f"HTTP status {status} for {method}")
        return call.values_in(json.dumps(record).encode())

    async def batch(self, method: str, size: int, params: Any = ()) -> bool:
        """Whether it answers a batch of this size whole."""
        calls = [{"jsonrpc": "2.0", "id": number, "method": method, "params": params} for number in range(size)]
        try:
            replies = await self._send(calls, size)
        except Refused:
            return False
        is_whole = isinstance(replies, list) and len(replies) == size
        return is_whole and all(isinstance(each, dict) and each.get("result") is not None for each in replies)

    async def _send(self, body: Any, calls: int) -> Any:
        if self.calls + calls > MOST_CALLS:
            raise Refused(0, "the doctor's own limit of calls is reached")
        self.calls += calls
        # The service follows no redirects either: the key must not go elsewhere.
        async with self._session.post(self._url, json=body, headers=self._headers, allow_redirects=False) as response:
            self._note_limits(response)
            text = await response.text()
        if 300 <= response.status < 400:
            raise Refused(response.status, f"HTTP status {response.status}, a redirect: name the URL that it leads to")
        try:
            reply = json.loads(text)
        except ValueError:
            reply = None
        if response.status >= 400 and not (isinstance(reply, list | dict) and "error" in reply):
            raise Refused(response.status, f"HTTP status {response.status}")
        if reply is None:
            raise Refused(0, "the reply is not JSON")
        return reply

    def _note_limits(self, response: aiohttp.ClientResponse) -> None:
        self.limited += response.status == 429
        for name in _RATE_HEADERS:
            number = response.headers.get(name, "").split(",")[0].strip()
            if number.isdecimal():
                self.rate = float(number)

    async def socket(self, method: str, *params: Any) -> float:
        """The seconds until a subscription is confirmed over WebSocket."""
        self.calls += 1
        began = time.monotonic()
        url = self._url.replace("http", "ws", 1)
        async with self._session.ws_connect(url, headers=self._headers) as socket:
            await socket.send_json({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
            _result(await socket.receive_json())
        return time.monotonic() - began


def _result(reply: Any) -> Any:
    if not isinstance(reply, dict):
        raise Refused(0, "the reply is not JSON-RPC")
    if (error := reply.get("error")) is not None:
        known = error if isinstance(error, dict) else {}
        code = known.get("code")
        raise Refused(code if isinstance(code, int) else 0, str(known.get("message", error)))
    return reply.get("result")


class Examination:
    """All measurements of one upstream. `rows`: for people; `block`: the settings."""

    def __init__(
        self, patient: Patient, tables: settings.Tables, expected: Network | None, show: Callable[[str], None]
    ) -> None:
        self._patient = patient
        self._tables = tables
        self._expected = expected
        self._show = show
        self.rows: list[dict[str, Any]] = []
        self.block: dict[str, Any] = {}
        self.network: Network | None = None
        self.has_socket = False
        self._head = 0

    def __repr__(self) -> str:
        return f"<Examination {[row['check'] for row in self.rows]}>"

    def _note(self, check: str, result: Any, note: str = "") -> None:
        self.rows.append({"check": check, "result": result, "note": note})

    async def run(self) -> None:
        if self._expected is not None and self._expected.family not in READERS:
            await self._of_data_family(self._expected)
            return
        await self._chain()
        steps: list[tuple[str, Callable[[], Awaitable[None]]]] = [("latency", self._latency), ("head", self._find_head)]
        if self.network is None or self.network.family == "evm":
            steps += [("methods", self._methods), ("logs", self._logs), ("archive", self._archive)]
            steps += [("WebSocket", self._socket)]
        for name, step in [*steps, ("batches", lambda: self._batches(self._head_method))]:
            self._show(f"measuring {name} ({self._patient.calls} calls so far)")
            await step()
        self._limits()

    async def _of_data_family(self, expected: Network) -> None:
        """Ask what the family's file says."""
        family = family_of(expected)
        lookups = family.head.lookups
        assert lookups.chain is not None  # Every family's file has it.
        self._show("asking for the chain")
        identity = lookups.chain.identity(
            await self._values(lookups.chain, lookups.chain.given(expected.facts.genesis_at, "at"))
        )
        same = [each for each in self._tables.chains.networks() if each.family == expected.family]
        self.network = next((each for each in (expected, *same) if each.identity == identity), None)
        self._note(
            "chain", identity, self.network.id if self.network else "not known: `chains add` writes a file for it"
        )
        self._show("measuring latency")
        times, head = [], None
        for _ in range(LATENCY_CALLS):
            began = time.monotonic()
            head = lookups.number.number(await self._values(lookups.number, {}))
            times.append(1000 * (time.monotonic() - began))
        self._note("latency", f"{statistics.median(times):.1f} ms", f"slowest {max(times):.1f} ms of {LATENCY_CALLS}")
        self._note("head", head)
        if lookups.status is not None:
            await self._status(lookups.status)
        if family.rest is None and family.batches:
            method, params = lookups.number.first
            await self._batches(method, json.loads(params))
        self._limits()

    async def _values(self, lookup: Lookup, values: Values) -> Values:
        for call in lookup.calls:
            values = values | await self._patient.ask(call, values)
        return values

    async def _status(self, lookup: Lookup) -> None:
        """Not every upstream has all of the calls."""
        values: Values = {}
        for call in lookup.calls:
            try:
                values |= await self._patient.ask(call, values)
            except Refused:
                continue
        self._note("syncing", "yes" if values.get("syncing") == b"true" else "no")
        if floor := values.get("floor"):
            self._note("lowest block", text_of(floor))

    async def _chain(self) -> None:
        self._show("asking for the chain")
        try:
            identity = str(int(await self._patient.call("eth_chainId"), 16))
        except Refused as exc:
            if not exc.is_no_method:
                raise
            identity = str(await self._patient.call("getGenesisHash"))
        except (TypeError, ValueError):
            raise Refused(0, "the reply to eth_chainId is not a number") from None
        genesis = next((each for each in self._tables.chains.networks() if each.identity == identity), None)
        self.network = self._tables.find_network(identity) or genesis
        name = self.network.id if self.network is not None else "unknown"
        self._note("chain", identity, name if self.network else "not known: `chains add` writes a file for it")

    @property
    def _head_method(self) -> str:
        return "eth_blockNumber" if self.network is None or self.network.family == "evm" else "getSlot"

    async def _latency(self) -> None:
        times = []
        for _ in range(LATENCY_CALLS):
            began = time.monotonic()
            await self._patient.call(self._head_method)
            times.append(1000 * (time.monotonic() - began))
        self._note("latency", f"{statistics.median(times):.1f} ms", f"slowest {max(times):.1f} ms of {LATENCY_CALLS}")

    async def _find_head(self) -> None:
        if self._head_method != "eth_blockNumber":
            self._note("head", await self._patient.call(self._head_method))
            return
        block = await self._patient.call("eth_getBlockByNumber", "latest", False)
        self._head = int(block["number"], 16)
        age_s = time.time() - int(block["timestamp"], 16)
        self._note("head", self._head, f"{max(0.0, age_s):.0f} s old")

    async def _methods(self) -> None:
        version = ""
        try:
            version = str(await self._patient.call("web3_clientVersion"))[:60]
        except Refused:
            pass
        missing: list[str] = []
        present: list[str] = []
        for method, params in _probes(self._head).items():
            try:
                await self._patient.call(method, *params)
                present.append(method)
            except Refused as exc:
                (missing if exc.is_no_method else present).append(method)
        self._note("client", version or "unknown")
        self._note(
            "methods", f"{len(present)} of {len(present) + len(missing)}", f"missing: {', '.join(missing) or 'none'}"
        )
        if missing:
            self.block["deny"] = missing

    async def _logs(self) -> None:
        """Ranges of an address without logs, so that replies are small."""
        widest, reason = 0, ""
        for blocks in (each for each in LOG_RANGES if each <= self._head or each == LOG_RANGES[0]):
            first = hex(max(0, self._head - blocks + 1))
            try:
                await self._patient.call(
                    "eth_getLogs", {"fromBlock": first, "toBlock": hex(self._head), "address": NO_ADDRESS}
                )
                widest = min(blocks, self._head + 1)
            except Refused as exc:
                reason = str(exc)[:80]
                break
        note = f"refuses more: {reason}" if reason else "more was not tried"
        self._note("log range", f"{widest} blocks", f"{note}; wider ranges are split")

    async def _archive(self) -> None:
        """Search for the oldest block whose state it has, as the running service does."""
        family = family_of(self.network or next(n for n in self._tables.chains.networks() if n.family == "evm"))
        lookup, search = family.head.lookups.bounds["state"], BoundSearch(self._head, usual_kept=family.kept_blocks)
        while (block := search.next_block) is not None and search.calls < MOST_SEARCHED:
            method, params = lookup.calls[0].with_values(lookup.given(block))
            try:
                await self._patient.call(method, *json.loads(params))
                search.answered(block, is_held=True)
            except Refused:
                search.answered(block, is_held=False)
        oldest = self._head if (bound := search.bound) is None else bound.oldest(self._head)
        kept = self._head - oldest + 1
        self._note("archive", "no" if oldest else "yes", f"state of the newest {kept} blocks")
        # It may prune, so its oldest block moves with the head.
        self.block |= {"bounds": {"state": -kept}} if oldest else {"archive": True}

    async def _socket(self) -> None:
        try:
            took_s = await self._patient.socket("eth_subscribe", "newHeads")
            self.has_socket = True
            self._note("WebSocket", "yes", f"subscribed within {1000 * took_s:.0f} ms, at the same path")
        except (Refused, aiohttp.ClientError, OSError, TimeoutError, ValueError, TypeError):
            self._note("WebSocket", "no", "not at the same path; it may have another URL")

    async def _batches(self, method: str, params: Any = ()) -> None:
        largest = 1
        for size in BATCHES:
            if not await self._patient.batch(method, size, params):
                break
            largest = size
        note = "larger ones were not tried" if largest == BATCHES[-1] else "larger ones are refused"
        self._note("batch", f"{largest} calls", note if largest > 1 else "batches are refused")
        self.block["batch"] = largest

    def _limits(self) -> None:
        patient = self._patient
        if patient.rate:
            self.block["requests_per_second"] = patient.rate
        shown = f"{patient.rate:g} per second" if patient.rate else "not stated"
        self._note(
            "rate limit", shown, f"{patient.limited} of {patient.calls} calls got a 429" if patient.limited else ""
        )
        self._note("calls", patient.calls)


def _probes(head: int) -> dict[str, list[Any]]:
    """Calls that tell whether methods exist. Any other error than an unknown method means that it does."""
    block, zero = hex(head), "0x" + 64 * "0"
    call = {"to": NO_ADDRESS, "data": "0x"}
    return {
        "eth_call": [call, "latest"],
        "eth_feeHistory": ["0x1", "latest", []],
        "eth_getBlockReceipts": [block],
        "eth_getProof": [NO_ADDRESS, [], "latest"],
        "eth_createAccessList": [call, "latest"],
        "eth_simulateV1": [{"blockStateCalls": [{"calls": [call]}]}, "latest"],
        "eth_newFilter": [{"fromBlock": block, "toBlock": block, "address": NO_ADDRESS}],
        "debug_traceTransaction": [zero],
        "debug_traceCall": [call, "latest", {}],
        "trace_block": [block],
        "trace_transaction": [zero],
        "txpool_status": [],
    }


async def _run(args: argparse.Namespace) -> int:
    tables = settings.shipped_tables()
    url, expected = _target(args, tables)
    headers = _headers(args)
    progress = None if args.json else Progress()
    timeout = aiohttp.ClientTimeout(total=REPLY_S)
    async with aiohttp.ClientSession(timeout=timeout, trace_configs=[no_redirects()]) as session:
        show = progress.show if progress else lambda _: None
        examination = Examination(Patient(session, url, headers), tables, expected, show)
        try:
            await examination.run()
        except Refused as exc:
            hint = "" if args.network else ", and name its network with --network if it is of another family than EVM"
            raise InvalidRequest(f"the upstream cannot be used: {exc}: check the URL and the key{hint}") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise InvalidRequest(f"the upstream does not reply ({type(exc).__name__}): check the URL") from None
        finally:
            if progress:
                progress.close()
    network = examination.network
    if expected is not None and network is not expected and (network is None or network.id != expected.id):
        raise InvalidRequest(f"the upstream serves {network.id if network else 'another chain'}, not {expected.id}")
    blocks = _blocks(args, url, headers, examination)
    _print(args, examination, blocks)
    return 0


def _target(args: argparse.Namespace, tables: settings.Tables) -> tuple[str, Network | None]:
    """The URL to call, and the network that is expected there."""
    network = None if args.network is None else tables.find_network(args.network)
    if args.network is not None and network is None:
        raise StartError([f"--network: {settings.no_network(args.network, tables)}"])
    if not settings.has_provider(args.url):
        if not args.url.startswith(("http://", "https://")):
            raise StartError(["URL: must be an http or https URL, or PROVIDER://KEY"])
        return args.url, network
    if network is None:
        raise StartError(["--network NAME is required with a provider"])
    tree, faults = settings.expanded({"upstreams": [{"url": args.url, "network": network.id}]})
    if faults:
        raise StartError([f"URL: {fault.partition(': ')[2]}" for fault in faults])
    return tree["upstreams"][0]["url"], network


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    for text in args.header:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise StartError(["--header: write NAME=VALUE"])
        headers[name] = value
    return headers


def _blocks(
    args: argparse.Namespace, url: str, headers: Mapping[str, str], examination: Examination
) -> list[dict[str, Any]]:
    """The blocks of settings: one for calls, and one for subscriptions if WebSockets work."""
    network = examination.network.id if examination.network is not None else "CHAIN/NETWORK"
    access: dict[str, Any] = {"bearer": args.key} if args.key else {}
    own = {name: value for name, value in headers.items() if name != "Authorization" or not args.key}
    access |= {"headers": own} if own else {}
    written = args.url if settings.has_provider(args.url) else url
    blocks = [{"network": network, "url": written, **access, **examination.block}]
    if examination.has_socket:
        blocks.append({"network": network, "url": url.replace("http", "ws", 1), **access})
    return blocks


def _print(args: argparse.Namespace, examination: Examination, blocks: list[dict[str, Any]]) -> None:
    if args.write is not None:
        old = read_bytes(args.write) if args.write.exists() else b""
        separator = b"\n" if old and not old.endswith(b"\n\n") else b""
        write_private(args.write, old + separator + _text(blocks, shows_secrets=True).encode())
    if args.json:
        output.row({"checks": examination.rows, "settings": [_masked(block) for block in blocks]}, as_json=True)
        return
    output.rows(examination.rows, COLUMNS, as_json=False)
    print(f"\n{_text(blocks, shows_secrets=False)}", end="")
    where = (
        "--write FILE adds the block with them to a settings file" if args.write is None else f"added to {args.write}"
    )
    print(f"\nsecrets are masked here; {where}")


def _masked(block: Mapping[str, Any]) -> dict[str, Any]:
    secret = ("url", "bearer", "headers")
    return {name: masked_value(value).strip('"') if name in secret else value for name, value in block.items()}


def _text(blocks: list[dict[str, Any]], *, shows_secrets: bool) -> str:
    lines = []
    for block in blocks:
        shown = block if shows_secrets else _masked(block)
        lines += ["[[upstreams]]", *(f"{name} = {output.toml_value(value)}" for name, value in shown.items()), ""]
    return "\n".join(lines)
