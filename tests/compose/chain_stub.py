"""An upstream for containers: a chain with one block. Calls that it does not know get their method as the result."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HEAD = {
    "number": "0x10",
    "hash": "0x" + "11" * 32,
    "parentHash": "0x" + "10" * 32,
    "timestamp": "0x1",
    "transactions": [],
}
RESULTS: dict[str, Any] = {
    "eth_chainId": hex(11155111),
    "eth_blockNumber": HEAD["number"],
    "eth_getBlockByNumber": HEAD,
    "eth_getBlockByHash": HEAD,
    "eth_getLogs": [],
    "eth_getBlockReceipts": [],
}


class ChainStub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        replies = [self._reply(call) for call in (sent if isinstance(sent, list) else [sent])]
        body = json.dumps(replies if isinstance(sent, list) else replies[0]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": call["id"], "result": RESULTS.get(call["method"], call["method"])}

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", 8545), ChainStub).serve_forever()
