"""An upstream that takes JSON-RPC calls and replies in the envelope of TON's servers (`core/ok_replies.py`)."""

from __future__ import annotations

from proxy.core.jsonrpc import ENVELOPE_START
from proxy.core.ok_replies import as_jsonrpc
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.http_upstream import HttpUpstream
from proxy.wire.rest_upstream import ReplyTranslator, RestUpstream
from proxy.wire.upstream import Piece, ReplySink, UpstreamConnection


class OkUpstream(RestUpstream):
    """Calls are sent as they are, one at a time on each connection, and replies are translated."""

    __slots__ = ()

    def submit(
        self, sink: ReplySink, *body: bytes, once: bool = False, fresh: bool = False, header: bytes = b""
    ) -> UpstreamConnection | None:
        translator = OkTranslator(self, sink, _id_of(b"".join(body[:2])), self._transport)
        self._translators[sink] = translator
        return HttpUpstream.submit(self, translator, *body, once=once, fresh=fresh, header=header)

    def probe_pool(self) -> HttpUpstream:
        return OkUpstream(self.health, self.probe_terms, self._transport, self._link)


class OkTranslator(ReplyTranslator):
    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        return False  # The result may stand anywhere in the reply.

    def _reply(self, connection: UpstreamConnection, status: int, body: bytes) -> bytes:
        return as_jsonrpc(self._id, status, body)


def _id_of(beginning: bytes) -> bytes:
    """The id in the beginning of a call. Ids of our own have no comma."""
    return beginning.removeprefix(ENVELOPE_START).partition(b",")[0]
