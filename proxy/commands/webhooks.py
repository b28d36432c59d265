"""`webhooks listen`: receive deliveries on this machine, verify and print them, and forward them to your program.

With a running development service it creates a webhook and deletes it at the end. With --secret it only receives, for an
existing webhook that reaches this machine through a tunnel. `webhooks trigger` sends a transaction that makes a real event.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson

from proxy import settings as settings_room
from proxy.commands.context import CHAIN, RUNNING, address
from proxy.core import signatures
from proxy.dev import triggers
from proxy.dev.triggers import EVENT_TYPES
from proxy.errors import InvalidRequest, StartError

API = "http://127.0.0.1:8545/v1"
# Headers of the connection, not of the message. They are not forwarded.
_HOP = frozenset({"host", "content-length", "connection", "accept-encoding", "transfer-encoding"})
FORWARD_S = 14.0


def register(commands: Any) -> None:
    parser = commands.add_parser("webhooks", help="receive, verify and forward deliveries on this machine")
    below = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listen = below.add_parser("listen", help="run a local receiver that verifies and prints deliveries")
    listen.add_argument("--forward", metavar="URL", help="forward each delivery to this URL and return its status")
    listen.add_argument("--port", type=int, default=0, metavar="N", help="port to listen on (default: any free port)")
    listen.add_argument("--secret", metavar="WHSEC", help="receive only, for a webhook with this signing secret")
    listen.add_argument("--chain", default="dev", help="chain of the new webhook (default: dev)")
    listen.add_argument(
        "--event-type", default="NEW_BLOCK", metavar="TYPE", help="event type of the new webhook (default: NEW_BLOCK)"
    )
    listen.add_argument(
        "--filter",
        type=_config,
        metavar="JSON",
        help="config of the new webhook, such as '{\"addresses\": [...]}' (default: one that `webhooks trigger` matches)",
    )
    listen.add_argument("--api", metavar="URL", help="base URL of the API (default: the local development service)")
    listen.add_argument("--key", metavar="KEY", help="API key (default: that of the development service)")
    listen.add_argument("--data", type=Path, metavar="DIR", help="data directory of the development service")
    listen.set_defaults(run=lambda args: asyncio.run(run(args)))
    _register_trigger(below)


def _register_trigger(below: Any) -> None:
    trigger = below.add_parser("trigger", help="send a transaction on the development chain that makes a real event")
    trigger.add_argument("type", choices=EVENT_TYPES, metavar="TYPE", help=f"one of {', '.join(EVENT_TYPES)}")
    trigger.add_argument(
        "--to",
        type=address,
        metavar="ADDRESS",
        help="the address that the event is about (default: a funded account)",
    )
    trigger.add_argument("--data", type=Path, metavar="DIR", help="data directory of the development service")
    trigger.set_defaults(run=lambda args: asyncio.run(_trigger(args)))


async def _trigger(args: argparse.Namespace) -> int:
    import aiohttp

    chain = _dev_chain(args.data or settings_room.data_directory())
    to = args.to or chain.receiver
    call = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "eth_sendTransaction",
        "params": [triggers.transaction(args.type, chain, to)],
    }
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(chain.upstream_url, json=call, allow_redirects=False) as response,
        ):
            reply = await response.json()
    except (aiohttp.ClientError, OSError, TimeoutError):
        raise InvalidRequest(f"the development chain at {chain.upstream_url} does not reply: is it running?") from None
    if "error" in reply:
        raise InvalidRequest(f"the development chain refused the transaction: {reply['error']['message']}")
    sent = reply["result"]
    config = orjson.dumps(triggers.matching_config(args.type, chain, to, sent)).decode()
    print(f"sent {sent}: {args.type} webhooks that it matches get an event, such as one with the config {config}")
    return 0


def _dev_chain(data: Path) -> triggers.DevChainFile:
    try:
        chain: triggers.DevChainFile = msgspec.json.decode((data / CHAIN).read_bytes(), type=triggers.DevChainFile)
    except (OSError, msgspec.DecodeError):
        raise StartError(
            ["no development chain: start one with `make run` (with --data if it uses another directory)"]
        ) from None
    if not chain.tokens:
        raise StartError(["the development chain has no contracts: start it without --no-contracts"])
    return chain


def _config(text: str) -> dict[str, Any]:
    try:
        config = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise argparse.ArgumentTypeError(f"not valid JSON: {exc}") from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return config


async def run(args: argparse.Namespace) -> int:
    import aiohttp
    from aiohttp import web

    if args.forward and urlsplit(args.forward).scheme not in ("http", "https"):
        raise StartError([f"--forward {args.forward}: must be an http or https URL"])
    if args.secret is not None:
        _check_secret(args.secret)
    ended = asyncio.Event()
    # The webhook is deleted on SIGTERM too.
    with suppress(NotImplementedError, ValueError, RuntimeError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=FORWARD_S), auto_decompress=False)
        )
        receiver = LocalReceiver(session, args.forward)
        application = web.Application(client_max_size=16 * 1024 * 1024)
        application.router.add_post("/{path:.*}", receiver.receive)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, "127.0.0.1", args.port).start()
        except OSError as exc:
            raise StartError([f"--port {args.port}: cannot listen ({exc.strerror})"]) from None
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        if args.secret is not None:
            receiver.secret = args.secret
            print(f"listening on {url}", flush=True)
        else:
            await _subscribe(stack, session, receiver, _service(args), url, args)
        await ended.wait()
    return 0


def _check_secret(secret: str) -> None:
    try:
        signatures.key_of(secret)
    except ValueError:
        raise StartError(
            ["--secret: must be whsec_ followed by base64, as returned when the webhook was created"]
        ) from None


@dataclass(frozen=True, slots=True)
class Service:
    api: str
    key: str


def _service(args: argparse.Namespace) -> Service:
    """The service given by --api and --key, or the local development service."""
    data = args.data or settings_room.data_directory()
    key = args.key
    if key is None:
        try:
            key = orjson.loads((data / "keys.json").read_bytes())["enterprise"]["live"]
        except (OSError, orjson.JSONDecodeError, KeyError):
            raise StartError(
                ["no API key: start `make run` (with --data if it uses another directory), or pass --api and --key"]
            ) from None
    return Service((args.api or _running_api(data)).rstrip("/"), key)


def _running_api(data: Path) -> str:
    try:
        shown = orjson.loads((data / RUNNING).read_bytes())["dashboard"]["url"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return API
    address = urlsplit(shown)
    return f"{address.scheme}://{address.netloc}/v1" if address.netloc else API


async def _subscribe(
    stack: AsyncExitStack, session: Any, receiver: LocalReceiver, service: Service, url: str, args: argparse.Namespace
) -> None:
    """Create a webhook and delete it on exit."""
    config = _default_config(args) if args.filter is None else args.filter
    body = {"url": url, "chain": args.chain, "event_type": args.event_type, "config": config}
    webhook = await _ask(session, service, "POST", "/webhooks", body)
    receiver.secret = webhook["signing_secret"]
    stack.push_async_callback(_ask, session, service, "DELETE", f"/webhooks/{webhook['id']}", None)
    print(f"{webhook['id']} ({args.event_type} on {args.chain}) delivers to {url}; Ctrl-C deletes it", flush=True)
    if args.chain == "dev":
        print(
            f"the development chain makes a block for each transaction: `{args.program} webhooks trigger {args.event_type}` "
            "sends one",
            flush=True,
        )


def _default_config(args: argparse.Namespace) -> dict[str, Any]:
    """A filter for the events of `webhooks trigger`; empty on other chains and for unknown types."""
    if args.chain != "dev" or args.event_type not in EVENT_TYPES:
        return {}
    try:
        chain = _dev_chain(args.data or settings_room.data_directory())
    except StartError:
        return {}
    return triggers.matching_config(args.event_type, chain, chain.receiver)


async def _ask(session: Any, service: Service, method: str, path: str, body: Any) -> Any:
    import aiohttp

    headers = {"X-API-Key": service.key}
    try:
        url = service.api + path
        async with session.request(method, url, json=body, headers=headers, allow_redirects=False) as response:
            reply = orjson.loads(await response.read())
    except (aiohttp.ClientError, OSError, TimeoutError, orjson.JSONDecodeError):
        raise InvalidRequest(f"the service at {service.api} does not reply: is it running? (see --api)") from None
    if "error" in reply:
        raise InvalidRequest(f"the service returned an error: {reply['error']['message']}")
    return reply


class LocalReceiver:
    """Verifies and prints deliveries."""

    def __init__(self, session: Any, forward: str | None) -> None:
        self._session = session
        self._forward = forward
        self.secret = ""

    async def receive(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.read()
        fault = fault_of(self.secret, request.headers, body, now=time.time())
        if fault is not None:
            print(f"refused: {fault}", flush=True)
            return web.Response(status=400, text=fault)
        status = await self._forward_delivery(request, body)
        print(line_of(request.headers, body, status if self._forward else None), flush=True)
        print(orjson.dumps(orjson.loads(body), option=orjson.OPT_INDENT_2).decode(), flush=True)
        return web.Response(status=status)

    async def _forward_delivery(self, request: Any, body: bytes) -> int:
        """Forward a delivery and return the status. 502 if the target does not reply, so that it is delivered again."""
        import aiohttp

        if self._forward is None:
            return 200
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        try:
            async with self._session.post(self._forward, data=body, headers=headers, allow_redirects=False) as response:
                return int(response.status)
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            print(f"{self._forward} does not reply: {type(exc).__name__}", flush=True)
            return 502


def fault_of(secret: str, headers: Any, body: bytes, *, now: float) -> str | None:
    """Why a delivery is invalid, or None if it is valid. All signatures and the timestamp are checked."""
    event, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not event or not stamp.isascii() or not stamp.isdecimal():
        return "webhook-id or webhook-timestamp is missing"
    if abs(now - int(stamp)) > signatures.TOLERANCE_S:
        return f"webhook-timestamp differs by more than {signatures.TOLERANCE_S} s from this machine's clock"
    expected = signatures.standard(secret, event, int(stamp), body)
    if not any(signatures.matches(each, expected) for each in headers.get("webhook-signature", "").split(" ")):
        return "webhook-signature does not match the secret and the body"
    own = {
        "X-Service-Signature": signatures.format_a(secret, int(stamp), body),
        "X-Platform-Signature": signatures.format_b(secret, body),
    }
    wrong = [name for name, value in own.items() if name in headers and not signatures.matches(headers[name], value)]
    return f"{wrong[0]} does not match" if wrong else None


def line_of(headers: Any, body: bytes, status: int | None) -> str:
    """`verified  NEW_BLOCK  evt_…  attempt 1  forwarded: 200`"""
    reply = orjson.loads(body)
    kind = reply.get("event_type") or reply.get("type")
    marked = "  TEST" if reply.get("test") else ""
    passed = "" if status is None else f"  forwarded: {status}"
    return f"verified  {kind}{marked}  {headers['webhook-id']}  attempt {headers.get('X-Webhook-Attempt', '?')}{passed}"
