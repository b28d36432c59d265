"""Wrong requests and the exact errors that a worker sends for them: texts that say what to do, `param`, `reason`, `docs`."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import orjson
import pytest

from proxy.core.access import mint
from proxy.errors import ERRORS_PAGE, REASONS, InvalidRequest
from proxy.settings import SCHEMAS
from tests.guide_pages import PAGES
from tests.http_client import request, rpc
from tests.web.worker import TEST, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, stub

CALLS = f"/v1/rpc/{TEST}"
CALL = rpc("eth_gasPrice")
OWNER = f"0x{'11' * 20}"
ABSENT = mint("live", bytes(32))
MISTYPED = f"{ABSENT[:-1]}{'a' if ABSENT[-1] != 'a' else 'b'}"
OBJECT = 'invalid request: a call must be an object such as {"jsonrpc": "2.0", "id": 1, "method": "…", "params": []}'
NO_KEY = "an API key is required: send it in the header X-API-Key or as Authorization: Bearer <API_KEY>"
IN_URL = "send the API key in the header X-API-Key, or as apiKey in the query if it is allowed in URLs"
KEYS = "API keys start with svc_live_ or svc_test_"
WALLET = "owner, chain, salt, version"


class Wrong(NamedTuple):
    status: int
    message: str
    reason: str
    param: str = ""
    target: str = CALLS
    body: bytes | None = None
    # None: the worker's own key. Empty: no key.
    key: str | None = None
    headers: dict[str, str] = {}  # noqa: RUF012


def wallet(status: int, message: str, param: str, body: Any) -> Wrong:
    return Wrong(status, message, "parameter", param, "/v1/wallets/create", orjson.dumps(body))


CASES = {
    "empty body": Wrong(400, "parse error: the body is empty: send a JSON-RPC call", "body", body=b""),
    "spaces": Wrong(400, "parse error: the body is empty: send a JSON-RPC call", "body", body=b" \n"),
    "half an object": Wrong(400, "parse error: the JSON ends too early", "body", body=b'{"jsonrpc":'),
    "not UTF-8": Wrong(400, "parse error: the body is not UTF-8", "body", body=b'{"jsonrpc":"2.0","id":1,"method":"\xff"}'),
    "a string": Wrong(400, OBJECT, "body", body=b'"eth_gasPrice"'),
    "a number": Wrong(400, OBJECT, "body", body=b"7"),
    "no method": Wrong(400, 'invalid request: member "method" is missing', "body", body=b'{"jsonrpc":"2.0","id":1}'),
    "method of a wrong type": Wrong(
        *(400, 'invalid request: member "method" must be the name of a method', "body"),
        body=b'{"jsonrpc":"2.0","id":1,"method":7}',
    ),
    "an unknown member of a call": Wrong(
        *(400, "invalid request: a call has the members jsonrpc, id, method and params only, not parms", "body"),
        body=b'{"jsonrpc":"2.0","id":1,"method":"eth_gasPrice","parms":[]}',
    ),
    "a long unknown member of a call": Wrong(
        *(400, "invalid request: a call has the members jsonrpc, id, method and params only", "body"),
        body=b'{"jsonrpc":"2.0","id":1,"method":"eth_gasPrice","%b":[]}' % (b"a" * 100_000),
    ),
    "empty body of a resource": Wrong(
        *(400, "the body is empty: send JSON", "body", "", "/v1/wallets/create", b""),
    ),
    "missing member": wallet(400, "owner: is required", "owner", {"chain": "ethereum"}),
    "member of a wrong type": wallet(400, "owner: must be a string, not 5", "owner", {"chain": "ethereum", "owner": 5}),
    "body of a wrong type": wallet(400, "body: must be an object, not []", "body", []),
    "mistyped member": wallet(
        *(400, f"onwer: is unknown; did you mean owner? known: {WALLET}", "onwer"),
        {"chain": "ethereum", "owner": OWNER, "onwer": 1},
    ),
    "unknown member": wallet(
        *(400, f"colour: is unknown; known: {WALLET}", "colour"), {"chain": "ethereum", "owner": OWNER, "colour": 1}
    ),
    "long unknown member": wallet(
        *(400, "body: has a member that is unknown", "body"), {"chain": "ethereum", "owner": OWNER, "a" * 1000: 1}
    ),
    "mistyped parameter": Wrong(
        *(400, "parameter 'limti' is unknown; did you mean limit? known: page, limit, chain", "parameter", "limti"),
        "/v1/wallets?limti=1",
    ),
    "parameter of a wrong type": Wrong(
        *(400, "parameter 'limit': must be an integer, not \"ten\"", "parameter", "limit", "/v1/wallets?limit=ten"),
    ),
    "no key": Wrong(401, NO_KEY, "key", body=CALL, key=""),
    "admin token": Wrong(
        *(401, f"the API key is not valid: this is an operator's admin token, which opens /v1/admin only; {KEYS}", "key"),
        body=CALL,
        key=f"adm_{'a' * 43}",
    ),
    "signing secret": Wrong(
        *(401, f"the API key is not valid: this is the signing secret of a webhook; {KEYS}", "key"),
        body=CALL,
        key="whsec_abc",
    ),
    "key in quotes": Wrong(
        401, "the API key is not valid: send it without the quotes around it", "key", body=CALL, key=f'"{ABSENT}"'
    ),
    "Bearer in X-API-Key": Wrong(
        401, "the API key is not valid: send it without Bearer in X-API-Key", "key", body=CALL, key=f"Bearer {ABSENT}"
    ),
    "mistyped key": Wrong(
        401, "the API key is not valid: it is mistyped or incomplete", "key", body=CALL, key=MISTYPED
    ),
    "another service's key": Wrong(401, f"the API key is not valid: {KEYS}", "key", body=CALL, key="abc"),
    "unknown key": Wrong(401, "the API key is not valid", "key", body=CALL, key=ABSENT),
    "unknown key in the query": Wrong(
        401, "the API key is not valid", "key", "", f"{CALLS}?apiKey={ABSENT}", CALL, key=""
    ),
    "unknown key in the path": Wrong(401, "the API key is not valid", "key", "", f"{CALLS}/{ABSENT}", CALL, key=""),
    "two keys": Wrong(
        *(400, "the request has two different API keys: send one", "key", "", f"{CALLS}?apiKey={ABSENT}", CALL),
        key=MISTYPED,
    ),
    "key in another parameter": Wrong(
        401, f"an API key is required: {IN_URL}", "key", "", f"{CALLS}?api_key={ABSENT}", CALL, key=""
    ),
    "key in a wrong place of the path": Wrong(
        *(404, f"there is no such path: {IN_URL}; /docs lists all paths", "path", "", f"{CALLS}/x/{ABSENT}", CALL),
        key="",
    ),
    "slash at the end": Wrong(
        *(404, "there is no such path: paths have no slash at their end; /docs lists all paths", "path"),
        target="/v1/chains/",
    ),
    "no such path": Wrong(404, "there is no such path; /docs lists all paths", "path", target="/v1/walets"),
    "no such network": Wrong(
        *(404, "there is no network atlantis/mainnet; GET /v1/chains lists those that this key can use", "network"),
        target="/v1/rpc/atlantis/mainnet",
        body=CALL,
    ),
    "wrong HTTP method": Wrong(405, "the method GET is not allowed here; allowed: POST", "http_method"),
    "invalid directive": Wrong(
        *(400, "X-Timeout-Ms must be a whole number from 1 to 300000, not 'soon'", "parameter", "X-Timeout-Ms"),
        body=CALL,
        headers={"X_Timeout_Ms": "soon"},
    ),
    "form": Wrong(
        *(415, "the header Content-Type must be application/json", "media_type"),
        body=CALL,
        headers={"Content_Type": "text/plain"},
    ),
}  # fmt: skip


async def send(worker: Worker, case: Wrong) -> Any:
    key = worker.keys["main"] if case.key is None else case.key or None
    method = "GET" if case.body is None else "POST"
    async with await worker.connect() as client:
        return await client.send(request(method, case.target, case.body or b"", key=key, **case.headers))


@pytest.mark.parametrize("name", CASES)
@on_uvloop
async def test_wrong_request_gets_its_error(name: str) -> None:
    case = CASES[name]
    async with Scripted(stub({"eth_gasPrice": "0x1"})) as upstream, running_worker({TEST: [upstream.url]}) as worker:
        error = (await send(worker, case)).fault(case.status)
    error.pop("details", None)
    assert error == {
        "code": error["code"],
        "message": case.message,
        "status": case.status,
        **({"param": case.param} if case.param else {}),
        "reason": case.reason,
        "docs": f"{ERRORS_PAGE}#{case.reason}",
    }


METHODS = {
    "eth_blocknumber": "does not exist or is not available; did you mean eth_blockNumber?",
    "eth_block_number": "does not exist or is not available; did you mean eth_blockNumber?",
    "eth_blockNumbr": "does not exist or is not available; did you mean eth_blockNumber?",
    "eth_getBalence": "does not exist or is not available; did you mean eth_getBalance?",
    "eth_sendTransaction": "is not available: the service holds no private keys: sign the transaction in your wallet "
    "and send it with eth_sendRawTransaction",
    "personal_sign": "is not available: the service holds no private keys: sign the text in your wallet",
    "eth_nothing": "does not exist or is not available",
    "a" * 128: "does not exist or is not available",
}


@on_uvloop
async def test_unknown_method_says_what_to_call() -> None:
    async with Scripted(stub({})) as upstream, running_worker({TEST: [upstream.url]}) as worker:
        found = {name: (await send(worker, Wrong(200, "", "", body=rpc(name)))).json["error"] for name in METHODS}
    assert found == {name: {"code": -32601, "message": f"the method {name} {words}"} for name, words in METHODS.items()}


def test_docs_is_a_url_if_the_public_one_is_known() -> None:
    error = InvalidRequest("salt: is too long", param="salt").body("https://rpc.example.com")["error"]
    assert error["docs"] == "https://rpc.example.com/docs/guide/errors/#parameter"


def test_reasons_of_the_api_spec_and_the_guide_are_those_of_the_code() -> None:
    spec = orjson.loads((SCHEMAS / "http" / "error.json").read_bytes())["ErrorDetail"]["properties"]["reason"]
    anchors = re.findall(r'<a id="(\w+)"></a>`\1`', (PAGES / "errors.md").read_text())
    assert tuple(spec["enum"]) == tuple(anchors) == REASONS
