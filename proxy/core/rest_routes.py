"""Calls to REST upstreams: from a request to a call with a method and params, and from a record back to a reply.

A family with a REST transport has routes as its methods, such as `GET /eth/v1/beacon/headers/{id}`. A request becomes a call of
such a method, so that it is priced, cached, joined, retried and recorded like every other call. Its params are

    {"path": {"id": "head"}, "query": {"topics": ["a", "b"]}, "accept": "application/json", "headers": {...}, "json": {...}}

with only the members that it has. A body of another type is `body`, in base64; lookups may have JSON there, as a text. The
result is a *record* of the reply: `{"status": 200, "headers": {...}, "body": …}`, where `body` is the JSON as the upstream
wrote it, or `base64` is the body of another kind.

Nothing but a listed route reaches an upstream: the target that is sent is built from the route and the values of its
placeholders, never from the bytes of the request. A path with anything that servers read in different ways (dot segments,
encoded slashes, doubled slashes, double encoding, parameters after a semicolon, control bytes) is refused, even if the rest of
it would match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

JSON: Final = "application/json"
VERBS: Final = ("GET", "POST")
# The longest path and query. Node servers accept 8 KB or more.
LONGEST_TARGET: Final = 8192
MOST_QUERY: Final = 256
# The largest body of a request. It is read, encoded and sent in one step.
LARGEST_BODY: Final = 262_144

_PLACEHOLDER: Final = re.compile(r"\{([a-z_]+)\}")
_TEMPLATE: Final = re.compile(r"(GET|POST) ((?:/(?:[A-Za-z0-9_.~-]+|\{[a-z_]+\}))+|/)")
_ENCODED: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_OCTET: Final = re.compile(r"%([0-9A-Fa-f]{2})")
# A segment in its decoded form: printable ASCII without the characters that some server gives a meaning in paths.
_SEGMENT: Final = re.compile(r"[!$&'()*+,\-.0-9:<=>@A-Z\[\]_a-z~ ]{1,512}")
# Everything that RFC 3986 allows to stand for itself in a segment.
_PATH_SAFE: Final = "!$&'()*+,:=@-._~"
_QUERY_SAFE: Final = "!$'()*,:@/-._~"
_PLAIN_QUERY: Final = re.compile(r"[\x20-\x7e]*")


class BadTarget(ValueError):
    """A path or a query that is not passed on. The text says what to change."""


@dataclass(frozen=True, slots=True)
class EventRoute:
    """A route that streams events. Clients name some of the `topics` in the query parameter `parameter`.

    `of_blocks`: topics with an event for each block.
    """

    method: str
    parameter: str
    topics: tuple[str, ...]
    of_blocks: frozenset[str] = frozenset()

    def wanted(self, query: Mapping[str, Sequence[str]]) -> list[str]:
        """The topics that a query names, in a fixed order. Raises BadTarget."""
        if unknown := [name for name in query if name != self.parameter]:
            raise BadTarget(f"{unknown[0][:40]!r} is not a parameter of this route: use {self.parameter!r} only")
        named = {name for value in query.get(self.parameter, ()) for name in value.split(",") if name}
        if not named or not named.issubset(self.topics):
            raise BadTarget(f"{self.parameter!r} must name one or more of {', '.join(self.topics)}")
        return [name for name in self.topics if name in named]


@dataclass(frozen=True, slots=True)
class RestTransport:
    """The headers and types that pass between clients and REST upstreams.

    `types`: media types of replies; the first one is the default. `body_types`: those of requests. `request_headers` and
    `reply_headers`: the names of headers that are passed on, in lower case. `error_member`: the first member of bodies that are
    errors, whatever their status. `events`: the route that streams events.
    """

    types: tuple[str, ...] = (JSON,)
    body_types: tuple[str, ...] = (JSON,)
    request_headers: frozenset[str] = frozenset()
    reply_headers: frozenset[str] = frozenset()
    error_member: str = ""
    events: EventRoute | None = None


NO_JSON: Final = msgspec.Raw()
# Between the rest of a record and its body of JSON. In a header's value, the quotes would be escaped.
RECORD_BODY: Final = b',"body":'


class RestParams(msgspec.Struct, omit_defaults=True):
    path: dict[str, str] = {}
    query: dict[str, list[str]] = {}
    accept: str = JSON
    headers: dict[str, str] = {}
    # The type of the body, if it is not JSON; the body is then in base64.
    type: str = JSON
    body: str = ""
    # A body of JSON as it was sent, without another encoding: a large one would take milliseconds.
    json: msgspec.Raw = NO_JSON


class RestCall(msgspec.Struct):
    """The parts of a JSON-RPC call that a request is made of."""

    id: msgspec.Raw
    method: str
    params: RestParams


class RestRecord(msgspec.Struct):
    """The reply to a call. `body`: JSON. `base64`: a body of another kind, in place of it, which reading decodes."""

    status: int
    headers: dict[str, str] = {}
    body: msgspec.Raw = msgspec.Raw()
    base64: bytes = b""


class RestError(msgspec.Struct):
    """An upstream's error. `data`: its reply, if callers may see it."""

    code: int = 0
    message: str = ""
    data: RestRecord | None = None


read_error = msgspec.json.Decoder(RestError).decode
read_call = msgspec.json.Decoder(RestCall).decode
read_json = msgspec.json.Decoder(msgspec.Raw).decode
write_params = msgspec.json.Encoder(order="deterministic").encode
read_record = msgspec.json.Decoder(RestRecord).decode


def read_beginning(beginning: bytes) -> RestRecord | None:
    """The record whose bytes before its body of JSON these are. None if it is not as our upstreams write it: one from the
    operator's settings may have its members in any order."""
    if not beginning.startswith(b'{"status":') or b',"headers":{' not in beginning:
        return None
    try:
        return read_record(beginning + b"}")
    except msgspec.DecodeError:
        return None


def split_record(record: bytes) -> RestRecord:
    """The record, with its body cut out: reading one of three megabytes would take milliseconds."""
    at = record.find(RECORD_BODY)
    parsed = None if at < 0 else read_beginning(record[:at])
    if parsed is None:
        return read_record(record)
    parsed.body = msgspec.Raw(record[at + len(RECORD_BODY) : -1])
    return parsed


def template_fault(name: str) -> str:
    """Why this is not a route; empty if it is one."""
    match = _TEMPLATE.fullmatch(name)
    if match is None:
        return "must be a verb and a path, such as `GET /blocks/{height}`"
    names = _PLACEHOLDER.findall(name)
    if len(names) != len(set(names)):
        return "has a placeholder twice"
    if any(segment in (".", "..") for segment in match[2].split("/")):
        return "must not contain dot segments"
    return ""


def rival_of(name: str, others: Iterable[str]) -> str:
    """A route that some paths of this one match as well, although none of both is the more exact one; empty if there is no such
    route."""
    if "{" not in name:
        return ""
    segments = _shape(name)
    return next((each for each in others if "{" in each and _are_rivals(segments, _shape(each))), "")


def _shape(name: str) -> list[str]:
    """The segments of a route. Placeholders are empty."""
    return _PLACEHOLDER.sub("", name.split(" ")[1]).split("/")[1:]


def _are_rivals(one: Sequence[str], other: Sequence[str]) -> bool:
    pairs = list(zip(one, other, strict=False))
    if len(one) != len(other) or any(left != right and left and right for left, right in pairs):
        return False
    return any(left and not right for left, right in pairs) and any(right and not left for left, right in pairs)


def _decoded(text: str) -> str:
    """Percent-encoded ASCII without its encoding. Each octet becomes one character."""
    return _OCTET.sub(lambda match: chr(int(match[1], 16)), text)


def _encoded(text: str, safe: str) -> str:
    """ASCII with all characters encoded that are not letters, digits or `safe`."""
    return "".join([each if each.isalnum() or each in safe else f"%{ord(each):02X}" for each in text])


def segments_of(path: str) -> list[str]:
    """The decoded segments of a raw path. Raises BadTarget unless every server would read it in the same way."""
    if len(path) > LONGEST_TARGET:
        raise BadTarget(f"the path has more than {LONGEST_TARGET} characters")
    if not path.isascii() or not path.isprintable() or path[:1] != "/" or "\\" in path:
        raise BadTarget("the path must be of printable ASCII: encode other characters with %")
    if _ENCODED.search(path):
        raise BadTarget("the path has a % without two hex digits: write %25 for a % itself")
    if path == "/":
        return []
    segments = []
    for raw in path[1:].split("/"):
        segment = _decoded(raw)
        if not segment:
            raise BadTarget("the path has an empty segment: remove doubled slashes and a slash at its end")
        if segment in (".", "..") or not _SEGMENT.fullmatch(segment):
            raise BadTarget("the path has a segment with dots alone, an encoded slash or another reserved character")
        segments.append(segment)
    return segments


def query_of(text: str) -> dict[str, list[str]]:
    """The values of a raw query by name, in the order in which they were sent. Raises BadTarget."""
    if len(text) > LONGEST_TARGET:
        raise BadTarget(f"the query has more than {LONGEST_TARGET} characters")
    if not text.isascii() or not text.isprintable() or _ENCODED.search(text):
        raise BadTarget("the query must be of printable ASCII: encode other characters with %")
    parameters: dict[str, list[str]] = {}
    parts = [part for part in text.split("&") if part]
    if len(parts) > MOST_QUERY:
        raise BadTarget(f"the query has more than {MOST_QUERY} parameters")
    for part in parts:
        name, _, value = part.partition("=")
        decoded = [_decoded(each.replace("+", " ")) for each in (name, value)]
        if not decoded[0] or not all(_PLAIN_QUERY.fullmatch(each) for each in decoded):
            raise BadTarget("the query has a parameter without a name, or with control characters")
        parameters.setdefault(decoded[0], []).append(decoded[1])
    return parameters


@dataclass(frozen=True, slots=True)
class _Branch:
    """The routes that begin with the same segments."""

    literal: dict[str, _Branch] = field(default_factory=dict)
    # The one placeholder that may follow, and the branch behind it.
    placeholder: list[tuple[str, _Branch]] = field(default_factory=list)
    # Routes that end here, by verb.
    methods: dict[str, str] = field(default_factory=dict)


class RouteTable:
    """The routes of a family. A segment that is written in a route comes before a placeholder."""

    def __init__(self, names: Iterable[str]) -> None:
        self._root = _Branch()
        for name in names:
            self.add(name)

    def __repr__(self) -> str:
        return f"<RouteTable {len(self._root.literal)} roots>"

    def add(self, name: str) -> None:
        """Raises ValueError if another route calls the same placeholder otherwise."""
        verb, path = name.split(" ")
        branch = self._root
        for segment in path[1:].split("/") if path != "/" else ():
            if match := _PLACEHOLDER.fullmatch(segment):
                if not branch.placeholder:
                    branch.placeholder.append((match[1], _Branch()))
                elif branch.placeholder[0][0] != match[1]:
                    raise ValueError(f"another route calls {segment} {{{branch.placeholder[0][0]}}}: use one name")
                branch = branch.placeholder[0][1]
            else:
                branch = branch.literal.setdefault(segment, _Branch())
        branch.methods[verb] = name

    def find(self, segments: Sequence[str]) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """The routes for a path by verb, and the values of their placeholders. Both are empty if there are none."""
        match = _matching(self._root, segments, 0)
        return ({}, {}) if match is None else (match[0].methods, dict(match[1]))


def _matching(branch: _Branch, segments: Sequence[str], at: int) -> tuple[_Branch, list[tuple[str, str]]] | None:
    if at == len(segments):
        return (branch, []) if branch.methods else None
    below = branch.literal.get(segments[at])
    if below is not None and (match := _matching(below, segments, at + 1)) is not None:
        return match
    for name, behind in branch.placeholder:
        if (match := _matching(behind, segments, at + 1)) is not None:
            return match[0], [(name, segments[at]), *match[1]]
    return None


def target_of(method: str, params: RestParams) -> tuple[str, str]:
    """The verb, and the path with its query as an upstream gets it."""
    verb, template = method.split(" ")
    path = _PLACEHOLDER.sub(lambda match: _encoded(params.path.get(match[1], ""), _PATH_SAFE), template)
    pairs = [(name, value) for name, values in params.query.items() for value in values]
    query = "&".join(f"{_encoded(name, _QUERY_SAFE)}={_encoded(value, _QUERY_SAFE)}" for name, value in pairs)
    return verb, f"{path}?{query}" if query else path


def accepted_type(accept: str, types: Sequence[str]) -> str:
    """The media type that suits an Accept header best (RFC 9110, 12.5.1); empty if none does. The first one wins a tie."""
    if not accept.strip():
        return types[0]
    best, best_weight = "", 0.0
    for kind in types:
        weight = _weight(accept, kind)
        if weight > best_weight:
            best, best_weight = kind, weight
    return best


def _weight(accept: str, kind: str) -> float:
    """The weight of the most specific range that covers the type."""
    weight, specific = 0.0, -1
    for part in accept[:1024].split(","):
        name, *options = [each.strip().lower() for each in part.split(";")]
        rank = 2 if name == kind else 1 if name == f"{kind.partition('/')[0]}/*" else 0 if name == "*/*" else -1
        if rank > specific:
            weights = [each[2:] for each in options if each.startswith("q=")]
            weight, specific = (_number(weights[0]) if weights else 1.0), rank
    return weight


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[01](?:\.\d{0,3})?", text) else 0.0
