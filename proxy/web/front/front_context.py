"""State that all hot-path connections of a worker share: services, limits, and the prepared bytes of reply headers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Final, final

from proxy.core import encodings, limits
from proxy.core.access import Key
from proxy.core.encodings import EncodedResults
from proxy.errors import Fault, Unauthorized
from proxy.memory_budget import BudgetLine
from proxy.request_threads import compression_threads
from proxy.services.accounts.admission import Admission
from proxy.services.rpc.rpc_service import RpcService
from proxy.settings import ServerSettings
from proxy.turn_queue import TurnQueue
from proxy.web.call_accounting import CallAccounting
from proxy.web.front.record_starts import RecordSplitter
from proxy.web.front.reply_lines import DIGITS
from proxy.web.front.request_headers import RequestHeaderReader, RequestHeaders
from proxy.web.reply import fixed_headers, header_lines
from proxy.web.request_ids import stem
from proxy.wire.write_buffer import WriteBuffer

# Larger than any reply.
NEVER: Final = 1 << 62
_HEX: Final = [b"%02x" % number for number in range(256)]


@final
class FrontContext:
    def __init__(
        self,
        header_reader: RequestHeaderReader,
        rpc: RpcService,
        admission: Admission,
        write_buffer: WriteBuffer,
        *,
        server: ServerSettings,
        held: BudgetLine,
        turns: TurnQueue,
        accounting: CallAccounting,
        shows_upstream: bool = False,
        shows_cost: bool = False,
        encoded_bytes: int = 0,
        site: str = "",
    ) -> None:
        """`encoded_bytes`: memory for cached results in compressed form. `site`: see `ConnectionLimiter`."""
        self.site = site
        # The size from which replies are compressed for clients that accept it.
        self.compress_from = server.compress_from or NEVER
        self.encoded = EncodedResults(encoded_bytes)
        self.records = RecordSplitter()
        self.header_reader = header_reader
        self.rpc, self.forwarder = rpc, rpc.forwarder
        self.write_buffer = write_buffer
        self.loop = asyncio.get_running_loop()
        self.max_header_bytes, self.max_requests = server.max_header_bytes, server.keepalive_requests
        self.held, self.turns = held, turns
        self.accounting = accounting
        self.logs, self.slow_s = accounting.logs, accounting.slow_s
        self.buckets = admission.buckets
        self._admission = admission
        self.draining = False
        # Whether replies name the upstream that produced them.
        self.shows_upstream = shows_upstream
        # Whether calls may have a cost, which replies show to clients that ask for it.
        self.shows_cost = shows_cost
        # Whether every reply may need extra header lines: X-Upstream, X-Cost, or Connection: close.
        self.adds_lines = shows_upstream or shows_cost
        self._fixed_lines = header_lines(fixed_headers(server.tls))
        self._served, self._stem = 0, stem()
        self._request_ids = b"%b%06x" % (self._stem, 0)
        # The X-RateLimit-Reset header that was written last, and the Unix time in it.
        self._reset_line, self._reset_at = b"", 0.0
        self.tick()

    def __repr__(self) -> str:
        return f"<FrontContext {self.header_reader!r}>"

    def tick(self) -> None:
        """Refresh the Date header. Called once a second."""
        self.stamp = b"\r\n%bDate: %b\r\n" % (self._fixed_lines, formatdate(usegmt=True).encode())
        self.ok_stamp = b"HTTP/1.1 200 OK\r\nContent-Type: application/json" + self.stamp + b"X-Request-Id: "
        self.accounting.tick()
        # Added to a bucket's edge on the monotonic clock, this gives the Unix time when the bucket is full, rounded up.
        self._resets = time.time() - time.monotonic() + 1.0 + (1.0 - 1e-6)

    def drain(self) -> None:
        """Make every reply from now on the last of its connection."""
        self.draining = self.adds_lines = True

    def request_id(self) -> bytes:
        """A new id, unique across workers and restarts."""
        self._served = served = (self._served + 1) & 0xFFFFFFFF
        if not served & 0xFF:
            self._request_ids = b"%b%06x" % (self._stem, served >> 8)
        return self._request_ids + _HEX[served & 0xFF]

    def rate_lines(self, key: Key, now: float) -> tuple[bytes, bytes, bytes]:
        """The three rate headers of a key, in parts: up to the remaining requests, their number, and the rest. The bucket's
        state is that of now: other calls may have taken from it since this one was admitted."""
        limit = key.rate if key.own_rate is None else self.buckets.tighter(key.rate, key.own_rate, now)
        edge = self.buckets.edge(limit.bucket_index)
        # A bucket that filled up more than a second ago is full now; its window does not end in the past.
        if edge < now - 1.0:
            edge = now - 1.0
        remaining = limits.remaining(edge, now, limit.requests_per_second)
        resets = edge + self._resets
        if not 0.0 <= resets - self._reset_at < 1.0:
            self._write_reset(resets)
        return (
            limit.limit_line,
            DIGITS[remaining] if remaining < 1024 else b"%d" % remaining,
            self._reset_line,
        )

    def rate_lines_without_key(self, transport: asyncio.Transport | None) -> bytes:
        """The three rate headers of a client's address."""
        peer = transport.get_extra_info("peername") if transport is not None else None
        headers = self._admission.headers_without_key(peer[0] if peer else "")
        return b"\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()

    def compress_apart(self, client: str, encoding: int, body: bytes, on_done: Callable[[bytes], None]) -> None:
        """Compress a very large body in a thread, so that other clients do not wait for it."""
        future = compression_threads.start(client, lambda: encodings.compress_apart(encoding, [body]))
        future.add_done_callback(lambda done: on_done(done.result()))

    def _write_reset(self, resets: float) -> None:
        """Format the X-RateLimit-Reset header. Most replies of a second have the same one."""
        seconds = int(resets)
        self._reset_line, self._reset_at = b"\r\nX-RateLimit-Reset: %d\r\n" % seconds, float(seconds)

    def refusal(self, headers: RequestHeaders, now: float) -> Fault:
        """Why the key may not call this route: disabled, expired, no matching scope, or a test key on a live network."""
        key = headers.key
        if key.expires_at <= now:
            key.invalidate()
            return Unauthorized("the API key is not valid")
        refusal = self._admission.authorize(key, headers.route.any_scope, headers.route.network)
        return refusal or Unauthorized("the API key is not valid")
