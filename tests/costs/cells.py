"""The rows and cells of the cost matrix: every operation, method kind and subscription kind, with its hostile inputs.

A row is an operation, a cell one input to it. Rows come from the API spec and from the tables of methods, so that a new
operation or kind of method is in the matrix without a change here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from urllib.parse import quote

import orjson

from proxy.chains.evm.bundler_methods import BUNDLER
from proxy.chains.family import Method
from proxy.core.rest_routes import LARGEST_BODY
from proxy.services.rpc.own_methods import MOST_PARAMS
from proxy.settings import SCHEMAS, shipped_tables
from proxy.web import api_spec
from proxy.web.api_spec import ApiOperation
from tests.costs.deep_upstream import HEAD
from tests.costs.hostile_inputs import (
    EVENT_TYPES,
    MOST_QUERY,
    TEXTS,
    Inputs,
    address,
    largest_config,
    log_filter,
    shown,
    text_of,
)
from tests.families_harness import CASES
from tests.rest_stubs import RestStub

EVM, SVM, BEACON = "ethereum/mainnet", "solana/mainnet", "ethereum-beacon/mainnet"
COSMOS = CASES["cosmos"].stub.network
# The networks of the other families, by their names. One has a node of its own, with events.
OTHERS = {name: case.stub.network for name, case in CASES.items() if name != "beacon"}
# The network of subscriptions. Its head moves on, and no follower reads its blocks.
MOVING = "base/mainnet"
# The holder of as many tokens as are listed, and more.
RICH = "0x" + "aa" * 20
# Limits of bodies, in bytes: `server.max_body_bytes`, `webhooks.max_body_bytes` and `bundler.max_body_bytes`.
BODY, LARGE_BODY, BUNDLER_BODY = 1 << 20, 1 << 23, 1 << 19
BATCH = 1000
RESULT = b"@result@"
# Blocks of a back-test: the most if only logs are read, if blocks are read, and if they are traced; and a few.
BACKTEST_BLOCKS = (2_000, 200, 50, 5)

# The service is called with a key, by a signed-in person, by an operator, or without any of these.
Caller = Literal["key", "account", "admin", "none"]
# Ids of existing things by the segment of the path before them: `{"webhooks": "wh_…"}`.
Seeds = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Request:
    """One cell over HTTP. `first`: a call whose result is put into the body. `values`: those of the webhook's filter that it
    writes. `is_dear`: it costs more units than a Free account gets in a second. `times`: how often it is sent at once."""

    shape: str
    method: str
    path: str
    body: bytes | None = None
    first: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    values: int = 0
    is_dear: bool = False
    times: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """`requests` makes the cells anew each time: together their bodies would fill the memory. `is_brief`: the short form has
    few of them, since the code is that of other rows."""

    name: str
    caller: Caller
    requests: Callable[[Seeds], Iterator[Request]] = field(repr=False)
    is_brief: bool = False


# Shapes of the long form only. The short form has others of the same kind.
LONG = frozenset(
    {
        "objects", "nesting", "nesting below the parser's limit", "strings", "one string", "fractions", "U+0000",
        "lone surrogate in a name", "unknown member", "only containers", "raw bytes", "range of 100000 blocks",
        "largest filter over 100000 blocks", "largest filter over 1000 blocks", "range of 10000 blocks",
        "batch of different calls", "batch of unknown methods",
    }
)  # fmt: skip
# Operations that store a webhook's filter.
FILTERED = ("create_webhook", "update_webhook")
# Back-tests of the short form: one that reads logs, one that reads blocks, one that reads traces.
SHORT_BACKTESTS = (
    "token_transfer over 50 blocks",
    "address_activity over 50 blocks",
    "INTERNAL_TRANSFER over 5 blocks",
)

# Filters of the short form. Larger ones cost what a Free account has for many seconds.
SHORT_FILTERS = ("long address_activity", "largest log")
LONG_LIST = 10_000
# Cells of brief rows in the short form.
BRIEF = frozenset({"sample", "an empty object", "containers", "an allowed segment in path", "many parameters as query"})


def is_short(row: Row, shape: str) -> bool:
    """Whether the cell is part of the short form too."""
    if row.is_brief:
        return shape in BRIEF
    if shape == f"batch of {BATCH}":
        return row.name.startswith("batches")
    if shape.startswith(("largest", "long ")) and row.name.endswith(FILTERED):
        return shape in SHORT_FILTERS
    if shape.endswith(" as a member"):
        return False
    if " over " in shape and " blocks" in shape and "filter" not in shape and "range" not in shape:
        return shape in SHORT_BACKTESTS and not row.name.startswith("account_")
    if " in " in shape and shape.startswith(("a long", "digits", "lone surrogate")) and not shape.endswith("a name"):
        return False
    return shape not in LONG


SPEC = api_spec.load(SCHEMAS)
DOCUMENT: dict[str, Any] = SPEC.document
INPUTS = Inputs(DOCUMENT)
TABLES = shipped_tables()
# These have rows for each kind of method or route below.
BY_METHOD = frozenset({"rpc_call", "rest_get", "rest_post", "bundler_call", "paymaster_call"})


def rows() -> Iterator[Row]:
    for operation in SPEC.operations.values():
        if operation.id not in BY_METHOD:
            yield operation_row(operation)
    for family, network in (("evm", EVM), ("svm", SVM)):
        for kind, method in kinds_of(family, network.split("/")[0]).items():
            yield call_row(f"{family} {kind}", f"/v1/rpc/{network}", method, BODY)
            if method.own:
                yield Row(f"{method.name} of its largest", "key", partial(own_requests, f"/v1/rpc/{network}", method))
    for kind, method in kinds_of(BUNDLER.name, "").items():
        yield call_row(f"bundler {kind}", f"/v1/bundler/{EVM}", method, BUNDLER_BODY)
    for name, price in TABLES.prices.paymaster.items():
        yield call_row(f"paymaster {name}", f"/v1/paymaster/{EVM}", Method(name, price=price), BUNDLER_BODY)
    yield Row("batches", "key", lambda _: batches())
    yield Row("large results at once", "key", lambda _: large_results())
    for name in rest_routes("beacon"):
        yield Row(f"rest {name}", "key", partial(rest_requests, BEACON, name))
    for family, network in OTHERS.items():
        if issubclass(CASES[family].stub, RestStub):
            for name in rest_routes(family):
                yield Row(f"{family} {name}", "key", partial(rest_requests, network, name), is_brief=True)
        else:
            for kind, method in kinds_of(family, network.split("/")[0]).items():
                yield call_row(f"{family} {kind}", f"/v1/rpc/{network}", method, BODY, is_brief=True)


# Operations of the API spec


def operation_row(operation: ApiOperation) -> Row:
    caller: Caller = "key" if operation.session is None else operation.session
    return Row(operation.id, caller, lambda seeds: operation_requests(operation, seeds))


def operation_requests(operation: ApiOperation, seeds: Seeds) -> Iterator[Request]:
    spec = DOCUMENT["paths"][operation.path][operation.method.lower()]
    shared = DOCUMENT["paths"][operation.path].get("parameters", [])
    parameters = [INPUTS.resolved(each) for each in (*shared, *spec.get("parameters", ()))]
    path = "/v1" + _filled(operation.path, parameters, seeds)
    if "requestBody" in spec:
        schema = INPUTS.resolved(spec["requestBody"])["content"]["application/json"]["schema"]
        size = LARGE_BODY if operation.large_body else BODY
        filters = dict(_filters(schema))
        for shape, body in (*filters.items(), *INPUTS.bodies(schema, size)):
            values = body.count(b'"0x') if operation.id.endswith(FILTERED) else 0
            yield Request(shape, operation.method, path, body, values=values, is_dear=shape in filters)
    else:
        yield Request("plain", operation.method, path + _query_of(parameters), is_dear=RICH in path)
        yield Request("all parameters", operation.method, path + _query_of(parameters, required=False))
    query = {each["name"]: each["schema"] for each in parameters if each["in"] == "query"}
    for shape, text in INPUTS.queries(query) if query else ():
        empty = b"{}" if "requestBody" in spec else None
        yield Request(shape, operation.method, f"{path}?{text}", empty, is_dear=RICH in path)
    for each in parameters:
        if each["in"] == "path":
            for shape, text in (("U+0000", "%00"), ("lone surrogate", "%ED%A0%80"), ("a long text", "x" * 6000)):
                hostile = "/v1" + _filled(operation.path, parameters, {**seeds, each["name"]: text})
                yield Request(
                    f"{shape} in {each['name']}", operation.method, hostile, b"{}" if "requestBody" in spec else None
                )


def _filled(path: str, parameters: Sequence[Mapping[str, Any]], seeds: Seeds) -> str:
    examples = {each["name"]: each.get("example") or INPUTS.sample(each["schema"]) for each in parameters}
    segments = path.split("/")
    for index, segment in enumerate(segments):
        if segment.startswith("{"):
            name = segment[1:-1]
            found = seeds.get(name) or seeds.get(segments[index - 1])
            segments[index] = found or quote(str(examples[name]), safe="%")
    return "/".join(segments)


def _query_of(parameters: Sequence[Mapping[str, Any]], *, required: bool = True) -> str:
    """The query with the examples of the spec: of what is required, or of all parameters but places in a list."""
    found = {
        each["name"]: each.get("example") or INPUTS.sample(each["schema"])
        for each in parameters
        if each["in"] == "query" and (each.get("required") if required else each["name"] not in ("cursor", "pageKey"))
    }
    return "?" + "&".join(f"{name}={shown(value)}" for name, value in found.items()) if found else ""


def _filters(schema: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """The largest configs, for bodies that have one: with an event type, and over a range of blocks."""
    inner = INPUTS.resolved(schema).get("properties", {})
    if "config" not in inner:
        return
    base = INPUTS.sample(schema)
    for kind in EVENT_TYPES if "event_type" in inner else EVENT_TYPES[:1]:
        named = {"event_type": kind} if "event_type" in inner else {}
        if "from_block" not in inner:
            yield f"largest {kind}", orjson.dumps({**base, **named, "config": largest_config(kind)})
            yield f"long {kind}", orjson.dumps({**base, **named, "config": largest_config(kind, LONG_LIST)})
            continue
        for blocks in BACKTEST_BLOCKS:
            ranged = {"from_block": HEAD - blocks, "to_block": HEAD - 1}
            body = {**base, **named, "config": largest_config(kind, 1000), **ranged}
            yield f"{kind} over {blocks} blocks", orjson.dumps(body)


# JSON-RPC


def kinds_of(family: str, chain: str) -> dict[str, Method]:
    """A method of each kind that the family has on the chain, by what distinguishes it. Subscriptions are apart."""
    found: dict[str, Method] = {}
    for method in sorted(TABLES.methods[family].values(), key=lambda each: not each.sample):
        if method.kind != "subscription" and (not method.chains or chain in method.chains):
            found.setdefault(_kind(method), method)
    return found


def _kind(method: Method) -> str:
    marks = {
        "at a block": method.block_at is not None,
        "over a range": method.span,
        "split": method.splits,
        "of history": method.history,
        "after an object": method.after_object,
        "creates a filter": method.creates_filter,
        f"polls as {method.same_as}": bool(method.same_as),
        "identified": method.identified,
        "private": method.private,
        "answered here": bool(method.answer),
        # Each has a program of its own.
        f"own {method.name}": method.own,
    }
    return " ".join((method.kind, *(mark for mark, has in marks.items() if has), f"cached {method.cache}"))


def call_row(name: str, path: str, method: Method, size: int, *, is_brief: bool = False) -> Row:
    return Row(f"{name}: {method.name}", "key", lambda _: call_requests(path, method, size), is_brief)


def call_requests(path: str, method: Method, size: int) -> Iterator[Request]:
    def post(shape: str, params: bytes, first: bytes | None = None, *, is_dear: bool = False) -> Request:
        return Request(shape, "POST", path, _call(method.name, params), first, is_dear=is_dear)

    for shape in TEXTS:
        yield post(shape, b"[%s]" % text_of(shape, size - 200))
    yield post("only containers", text_of("containers", size - 200))
    yield post("raw bytes", b'["0x%s"]' % (b"ab" * (size // 2 - 200)))
    sample = method.sample.encode() or _sample_params(method)
    yield post("sample", sample)
    yield post("an empty object", b"{}")
    if method.splits or method.span or method.creates_filter:
        for blocks in (1_000, 10_000, 100_000):
            wide = {"fromBlock": hex(HEAD - blocks), "toBlock": hex(HEAD - 1)}
            yield post(f"range of {blocks} blocks", orjson.dumps([wide]), is_dear=True)
            yield post(f"largest filter over {blocks} blocks", orjson.dumps([{**log_filter(), **wide}]), is_dear=True)
    if method.same_as:
        wide = {"fromBlock": hex(HEAD - 10_000), "toBlock": hex(HEAD - 1)}
        for shape, given in (("a wide filter", wide), ("the largest filter", {**log_filter(), **wide})):
            yield post(shape, b'["%s"]' % RESULT, _call("eth_newFilter", orjson.dumps([given])), is_dear=True)
    item = _call(method.name, sample)
    yield Request(
        f"batch of {BATCH}", "POST", path, b"[" + b",".join([item] * min(BATCH, size // (len(item) + 1))) + b"]"
    )


def own_requests(path: str, method: Method, _: Seeds) -> Iterator[Request]:
    """The largest params that a method of our own reads, and texts of as many bytes in a member."""
    for shape in TEXTS:
        params = b'[{"address":%s}]' % text_of(shape, MOST_PARAMS - 100)
        yield Request(f"{shape} as a member", "POST", path, _call(method.name, params))
    for shape, given in OWN_PARAMS.get(method.name, {}).items():
        yield Request(shape, "POST", path, _call(method.name, orjson.dumps(given)), is_dear=True)


_TRANSACTION = {"from": address(1), "to": address(2), "data": "0x" + "ab" * 100, "value": "0x1"}
_TRANSFERS = {"fromBlock": "0x0", "toBlock": "latest", "maxCount": "0x3e8", "category": ["erc20", "erc721", "erc1155"]}
OWN_PARAMS: dict[str, dict[str, list[Any]]] = {
    "alchemy_getAssetTransfers": {
        "all transfers of an address": [{**_TRANSFERS, "fromAddress": RICH}],
        "many contracts": [{**_TRANSFERS, "toAddress": RICH, "contractAddresses": [address(n) for n in range(100)]}],
    },
    "alchemy_getTokenBalances": {
        "a rich wallet": [RICH],
        "many contracts": [RICH, [address(n) for n in range(1500)]],
    },
    "alchemy_getTransactionReceipts": {"a full block": [{"blockNumber": hex(HEAD - 5)}]},
    "alchemy_simulateAssetChanges": {"a transaction": [_TRANSACTION]},
    "alchemy_simulateAssetChangesBundle": {"many transactions": [[_TRANSACTION] * 100], "few": [[_TRANSACTION] * 3]},
    "alchemy_simulateExecution": {"nested": [_TRANSACTION, "latest", {"traceOptions": {"format": "NESTED"}}]},
    "alchemy_simulateExecutionBundle": {"many transactions": [[_TRANSACTION] * 100], "few": [[_TRANSACTION] * 3]},
    "qn_getWalletTokenBalance": {
        "a rich wallet": [{"wallet": RICH, "perPage": 100, "page": 100}],
        "many contracts": [{"wallet": RICH, "contracts": [address(n) for n in range(100)]}],
    },
    "ankr_getAccountBalance": {
        "a rich wallet": [{"walletAddress": RICH, "blockchain": "eth"}],
        "its last page": [{"walletAddress": RICH, "blockchain": "eth", "pageToken": "9900"}],
        "all networks": [{"walletAddress": RICH, "blockchain": []}],
    },
}


def _sample_params(method: Method) -> bytes:
    params: list[Any] = [address(1)] * (method.block_at or 1)
    if method.block_at is not None:
        params.append("latest")
    return orjson.dumps(params)


def _call(method: str, params: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":1,"method":"%s","params":%s}' % (method.encode(), params)


def batches() -> Iterator[Request]:
    """Bodies that are arrays, of calls and of other things."""
    path = f"/v1/rpc/{EVM}"
    for shape in TEXTS:
        yield Request(shape, "POST", path, b"[%s]" % text_of(shape, BODY - 10))
    wide = orjson.dumps([{"fromBlock": hex(HEAD - 10_000), "toBlock": hex(HEAD - 1)}])
    calls = {
        "ranges": (BATCH, lambda _: _call("eth_getLogs", wide)),
        "large params": (10, lambda _: _call("eth_call", b"[%s]" % text_of("members", BODY // 11))),
        "containers": (10, lambda _: _call("eth_call", b"[%s]" % text_of("containers", BODY // 11))),
        "different calls": (BATCH, lambda n: _call("eth_getBalance", b'["%s","latest"]' % address(n).encode())),
        "unknown methods": (BATCH, lambda n: _call(f"eth_no{n}", b"[]")),
        "filters": (10, lambda _: _call("eth_newFilter", orjson.dumps([log_filter(100, 100)]))),
    }
    for shape, (count, call) in calls.items():
        yield Request(f"batch of {shape}", "POST", path, b"[" + b",".join(map(call, range(count))) + b"]")


def large_results() -> Iterator[Request]:
    """Calls with results of megabytes, from several accounts at once."""
    calls = {
        "receipts": ("eth_getBlockReceipts", [hex(HEAD - 30)]),
        "transactions": ("eth_getBlockByNumber", [hex(HEAD - 31), True]),
        "traces": ("debug_traceBlockByHash", ["0x" + "ab" * 32, {"tracer": "callTracer"}]),
        "of our own": ("alchemy_getTransactionReceipts", [{"blockNumber": hex(HEAD - 33)}]),
    }
    for shape, (method, params) in calls.items():
        body = _call(method, orjson.dumps(params))
        yield Request(shape, "POST", f"/v1/rpc/{EVM}", body, is_dear=True)
        yield Request(f"{shape} for three", "POST", f"/v1/rpc/{EVM}", body, is_dear=True, times=3)
    page = {"Origin": "https://page.example"}
    single = _call("eth_getBlockReceipts", orjson.dumps([hex(HEAD - 30)]))
    batch = b"[%b,%b]" % (single, _call("eth_getBlockReceipts", orjson.dumps([hex(HEAD - 31)])))
    for shape, body in (("receipts", single), ("batch of receipts", batch)):
        for way, headers in (("", {}), (" of a page", page)):
            for times in (1, 3):
                at_once = " for three" if times > 1 else ""
                if way or body is batch:
                    name = f"{shape}{way}{at_once}"
                    yield Request(name, "POST", f"/v1/rpc/{EVM}", body, None, headers, is_dear=True, times=times)
                for encoding in ("gzip", "br"):
                    name = f"{shape} in {encoding}{way}{at_once}"
                    packed = {**headers, "Accept-Encoding": encoding}
                    yield Request(name, "POST", f"/v1/rpc/{EVM}", body, None, packed, is_dear=True, times=times)


# REST routes of upstreams


def rest_routes(family: str) -> list[str]:
    """A route of each kind with each verb, and the dearest one."""
    methods = TABLES.methods[family].values()
    kinds = {f"{each.name.split()[0]} {_kind(each)}": each.name for each in methods}
    return sorted({*kinds.values(), max(methods, key=lambda each: each.price).name})


def rest_requests(network: str, name: str, _: Seeds) -> Iterator[Request]:
    """Hostile values in every part of a request: path, query, headers and body."""
    verb, template = name.split(" ")
    base = f"/v1/rest/{network}"
    path = base + re.sub(r"\{[a-z_]+\}", "80", template)
    body = b'{"ids":["1"]}' if verb == "POST" else None
    yield Request("sample", verb, path, body)
    for shape, text in REST_PATHS.items():
        yield Request(f"{shape} as path", verb, f"{base}/{text}", body)
        if "{" in template:
            yield Request(f"{shape} in path", verb, base + re.sub(r"\{[a-z_]+\}", text, template), body)
    for shape, text in REST_QUERIES.items():
        yield Request(f"{shape} as query", verb, f"{path}?{text}", body)
    for shape, headers in REST_HEADERS.items():
        yield Request(shape, verb, path, body, headers=headers)
    if verb == "POST":
        for shape in TEXTS:
            yield Request(shape, verb, path, text_of(shape, LARGEST_BODY - 200))
        yield Request("not UTF-8", verb, path, b"\xff" * LARGEST_BODY)
        yield Request("SSZ", verb, path, b"\xff" * LARGEST_BODY, headers={"Content_Type": "application/octet-stream"})
        yield Request("quotes", verb, path, b'["' + b'\\"' * (LARGEST_BODY // 2 - 200) + b'"]')
        yield Request("too large", verb, path, b" " * (LARGEST_BODY + 1))


# Request lines and headers have at most 8,000 bytes.
REST_PATHS = {
    "a long segment": "x" * MOST_QUERY,
    "an allowed segment": "x" * 500,
    "many segments": "a/" * (MOST_QUERY // 2) + "a",
    "encoded letters": "%41" * (MOST_QUERY // 3),
    "encoded slashes": "%2f" * (MOST_QUERY // 3),
    "many slashes": "/" * MOST_QUERY,
    "dots": "../" * (MOST_QUERY // 3),
    "near a route": "eth/v1/beacon/header/80/" + "x" * 70,
}
REST_QUERIES = {
    "many parameters": "&".join(f"id={number}" for number in range(250)),
    "too many parameters": "a=&" * (MOST_QUERY // 3),
    "no parameters": "&" * MOST_QUERY,
    "encoded letters": "id=" + "%41" * (MOST_QUERY // 3 - 1),
    "a long value": "id=" + "x" * (MOST_QUERY - 3),
    "encoded line ends": "id=" + "%0d%0a" * (MOST_QUERY // 6),
}
REST_HEADERS: dict[str, dict[str, str]] = {
    "many types": {"Accept": "a/b;q=0.1," * 800},
    "many commas": {"Accept": "," * 8000},
    "many options": {"Accept": "*/*" + ";q=0.1" * 1300},
    "a long header": {"Eth_Consensus_Version": "x" * 8000},
    "no type that is served": {"Accept": "text/html"},
}


# Subscriptions


@dataclass(frozen=True, slots=True)
class Subscriptions:
    """A row over a socket: many subscriptions of one kind, each with params of its own."""

    name: str
    network: str
    method: str
    shape: str
    # By its number and the head of the chain.
    params: Callable[[int, int], list[Any]] = field(repr=False)
    # At most this many; a plan may allow fewer.
    count: int = 400

    @property
    def at_once(self) -> int:
        """How many are asked for together. Large ones come one by one: a socket has no more room for messages."""
        return 1 if len(orjson.dumps(self.params(0, HEAD))) > 10_000 else min(20, self.count)

    @property
    def is_long(self) -> bool:
        """Whether it is not part of the short form, which has no subscriptions without params."""
        return self.shape == "plain"


def _key(number: int, size: int = 32) -> str:
    """A Solana address, or a signature of 64 bytes."""
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    digits = ""
    number += 1 << 8 * size - 6
    while number:
        number, rest = divmod(number, 58)
        digits = alphabet[rest] + digits
    return digits


def _largest_filter(number: int) -> dict[str, Any]:
    """The largest filter of logs, each with an address of its own."""
    found = log_filter()
    return {**found, "address": [*found["address"][:-1], address(10_000 + number)]}


def _old(head: int) -> dict[str, str]:
    """As far back as a replay may go, and a little less: the head moves on."""
    return {"fromBlock": hex(head - 9_990)}


Params = dict[str, Callable[[int, int], list[Any]]]
# Dear params by the kind of a subscription. A kind that is not listed is still subscribed to without any.
EVM_PARAMS: dict[str, Params] = {
    "newHeads": {"from an old block": lambda _, head: [_old(head)]},
    "logs": {
        "largest filters": lambda number, _: [_largest_filter(number)],
        "from an old block": lambda number, head: [{"address": address(number), **_old(head)}],
        "all logs from an old block": lambda _, head: [_old(head)],
    },
    "newPendingTransactions": {"whole transactions": lambda *_: [True]},
}
SVM_PARAMS: dict[str, Params] = {
    "accountSubscribe": {"many accounts": lambda number, _: [_key(number), {"encoding": "base64"}]},
    "programSubscribe": {"many programs": lambda number, _: [_key(number), {"encoding": "base64"}]},
    "logsSubscribe": {
        "many mentions": lambda number, _: [{"mentions": [_key(number)]}],
        "all logs": lambda *_: ["all"],
    },
    "signatureSubscribe": {"many signatures": lambda number, _: [_key(number, 64)]},
    "blockSubscribe": {"all blocks": lambda *_: ["all"]},
}
PLAIN: Params = {"plain": lambda *_: []}
# Replays are few: a socket that asks for more of them waits.
FEW = 16


def subscriptions() -> Iterator[Subscriptions]:
    for kind in TABLES.prices.events:
        if kind in ("svm", "streamed"):
            continue
        for shape, params in (EVM_PARAMS.get(kind, {}) | PLAIN).items():
            count = FEW if "old block" in shape else 400
            yield Subscriptions(f"eth_subscribe {kind}", MOVING, "eth_subscribe", shape, _named(kind, params), count)
    for method in TABLES.methods["svm"].values():
        if method.kind == "subscription" and method.name.endswith("Subscribe"):
            for shape, params in SVM_PARAMS.get(method.name, PLAIN).items():
                yield Subscriptions(method.name, SVM, method.name, shape, params)
    queries: Params = {
        "different queries": lambda number, _: [f"tm.event='Tx' AND app.key='{number}' AND a.b='{'x' * 400}'"],
        "one query": lambda *_: ["tm.event='NewBlock'"],
    }
    for shape, params in queries.items():
        yield Subscriptions("cosmos subscribe", COSMOS, "subscribe", shape, params)


def _named(kind: str, params: Callable[[int, int], list[Any]]) -> Callable[[int, int], list[Any]]:
    return lambda number, head: [kind, *params(number, head)]
