"""Records of requests: what happened to one call, for the person who made it.

Every failed and every slow request is recorded; others if they ask for it, or are sampled. A record never has a secret: it has
the id of the key, and params only if the account has turned that on, without anything that looks like a key.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from proxy.core.access import KEY_PREFIXES
from proxy.core.usage import Outcome

# An attempt: the upstream, when it began after the request, how long it took, both in seconds, and how it ended.
RecordedAttempt = tuple[str, float, float, str]
# Why a request was recorded.
RecordReason = Literal["failed", "slow", "asked", "sampled"]
# The cause of a failure. `limit`: a rate or a quota. `chain`: an error that the chain's rules demand, such as a revert.
Blame = Literal["", "client", "limit", "chain", "upstream", "service"]
AttemptKind = Literal["first", "hedge", "retry", "check", "read"]
Surface = Literal["http", "batch", "item", "socket", "rest", "webhook"]
# The ids of webhook events, which identify their deliveries; and our ids of requests. Clients cannot choose such ids.
_EVENT_PREFIX, OWN_PREFIX = "evt_", "req_"
# The beginning of the outcome of an attempt that verified the reply, and of one that a REST operation needed.
VERIFYING, READING = "for verification: ", "for the reply: "

MOST_PARAMS = 2048
MOST_ERROR = 500
# Characters of a method's name that callers invented.
MOST_NAME = 64
# Error codes by status. Other statuses below 500 have `invalid_request`, and the rest `internal_error`.
CODES = {401: "unauthorized", 403: "forbidden", 404: "not_found", 429: "rate_limited"}
_RPC_CODE = re.compile(r'"code":\s*(-?\d{1,12})\b')
# The hint of a key, whose middle is replaced by an ellipsis, is not secret.
_SECRET = re.compile(rf"(?:{'|'.join(KEY_PREFIXES)})(?!…)[0-9A-Za-z]*")


class RequestRecord(msgspec.Struct, kw_only=True):
    """A struct, because creating one takes a fraction of a dataclass's time, and a client waits for it."""

    id: str
    # Unix time at its end.
    at: float
    account: str
    key: str
    network: str
    surface: Surface
    # `other` for methods that do not exist; `called` is then the name that the caller gave, otherwise empty.
    method: str
    status: int
    reason: RecordReason
    called: str = ""
    units: int = 0
    # Its cost at upstreams' providers, in billionths of a dollar.
    cost: int = 0
    cache: str = ""
    took_s: float = 0.0
    bytes: int = 0
    block: int = 0
    error: str = ""
    blame: Blame = ""
    # The code of the error: a JSON-RPC code, or a name from the API's error table.
    code: str = ""
    attempts: Sequence[RecordedAttempt] = ()
    params: str | None = None
    # The id that the client chose, which other requests may have too, and how many others do. The latter is not stored.
    client_id: str = ""
    others: int = 0
    # The names of the key and the account when the record is read. Not stored.
    key_name: str = ""
    account_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """None means any."""

    network: str | None = None
    method: str | None = None
    # "failed", "slow", "asked" or "sampled".
    reason: str | None = None
    status: int | None = None
    key: str | None = None
    code: str | None = None
    client_id: str | None = None
    # The label of an upstream that was asked.
    upstream: str | None = None
    since: datetime.datetime | None = None
    until: datetime.datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordReader:
    """A reader of records, with the records that they may see. Operators may see all."""

    account: str | None = None
    # Only records on these networks, and those of the key that reads.
    networks: Sequence[str] | None = None
    key: str = ""


# A value that a filter can have: the name of the filter, the value, and a name to show if it has one.
FilterChoice = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorGroup:
    """Failed requests with the same status, code, method and key. `example`: the error of one of them."""

    status: int
    code: str
    method: str
    key: str
    # Empty if the key was deleted meanwhile. `account_name` likewise.
    key_name: str
    account: str
    account_name: str
    count: int
    last_at: datetime.datetime
    example: str
    # The upstreams that were asked last, five at most.
    upstreams: Sequence[str] = ()


def is_delivery(request_id: str) -> bool:
    """Whether an id is that of a webhook event."""
    return request_id.startswith(_EVENT_PREFIX)


def blame_of(outcome: Outcome, status: int) -> Blame:
    """The cause of a failure, which usage has counted with this outcome. Only usage decides between upstreams and ourselves."""
    match outcome:
        case "upstream_faults":
            return "upstream"
        case "faults":
            return "service"
        case _ if status < 400:
            return "chain"
        case _:
            return "limit" if status == 429 else "client"


def code_of(status: int, error: str) -> str:
    """The code of an error: that of the chain's error object, or the API's code of the status."""
    if error.startswith("{"):
        match = _RPC_CODE.search(error)
        return match[1] if match else ""
    return CODES.get(status) or ("invalid_request" if status < 500 else "internal_error")


def shown_text(text: str, most: int) -> str:
    """The beginning of a text, without anything that looks like an API key."""
    return _SECRET.sub("svc_…", text[: most + 64])[:most]


def kind_of(at: int, attempts: Sequence[RecordedAttempt]) -> AttemptKind:
    """Whether an attempt is the first, a hedge beside one that was slow, a retry after one that had ended, a check of the
    reply, or a read for it. The attempts are in the order in which they began."""
    outcome = attempts[at][3]
    if outcome.startswith(VERIFYING):
        return "check"
    if outcome.startswith(READING):
        return "read"
    if at == 0:
        return "first"
    began = attempts[at][1]
    is_beside = any(each[1] < began < each[1] + each[2] for each in attempts)
    return "hedge" if is_beside else "retry"
