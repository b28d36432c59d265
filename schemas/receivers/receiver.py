"""A webhook receiver with Python's standard library: WEBHOOK_SECRET=whsec_… python3 receiver.py"""

import hmac
import json
import os
import time
from base64 import b64decode, b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = os.environ["WEBHOOK_SECRET"]
TOLERANCE_S = 300
seen = set()  # ids of processed events: keep them in your database


def is_recent(seconds):
    return seconds.isdecimal() and abs(time.time() - int(seconds)) <= TOLERANCE_S


def is_equal(one, other):
    """Compare in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())


def standard(headers, body):
    """Standard Webhooks, sent with both formats: the key is the secret without whsec_, base64-decoded."""
    event_id, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    key = b64decode(SECRET.removeprefix("whsec_"))
    digest = hmac.digest(key, f"{event_id}.{stamp}.".encode() + body, "sha256")
    expected = "v1," + b64encode(digest).decode()
    given = headers.get("webhook-signature", "").split()
    return is_recent(stamp) and any(is_equal(one, expected) for one in given)


def format_a(headers, body):
    """Lower-case event types: the key is the whole secret, with whsec_."""
    stamp = headers.get("X-Service-Timestamp", "")
    digest = hmac.digest(SECRET.encode(), f"{stamp}.".encode() + body, "sha256")
    return is_recent(stamp) and is_equal(headers.get("X-Service-Signature", ""), digest.hex())


def format_b(headers, body):
    """Upper-case event types: the key is the whole secret, with whsec_."""
    digest = hmac.digest(SECRET.encode(), body, "sha256")
    return is_equal(headers.get("X-Platform-Signature", ""), "sha256=" + digest.hex())


def is_genuine(headers, body):
    """One valid signature is enough."""
    return any(check(headers, body) for check in (standard, format_a, format_b))


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not is_genuine(self.headers, body):
            return self.reply(401)
        event = json.loads(body)
        if event["id"] not in seen:
            print(event.get("event_type") or event["type"], event["id"], event["data"], flush=True)
        seen.add(event["id"])
        return self.reply(204)

    def reply(self, status):
        self.send_response(status)
        self.end_headers()


ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "3000"))), Receiver).serve_forever()
