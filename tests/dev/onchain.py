"""Direct calls to the development chain, bypassing the service, decoded with eth-abi."""

from __future__ import annotations

from typing import Any

import sha3
from eth_abi import decode, encode

from tests.service import Service


class Reverted(Exception):
    """The call reverted, with this data if any."""


async def rpc(url: str, service: Service, method: str, *params: Any) -> Any:
    call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": list(params)}
    async with service.nodes.post(url, json=call) as response:
        answer = await response.json()
    if "error" in answer:
        raise Reverted(answer["error"])
    return answer["result"]


async def read(service: Service, address: str, signature: str, gives: str, *values: Any) -> Any:
    """Call a view function and return its value, or a tuple of values."""
    types = signature[signature.index("(") + 1 : -1]
    data = sha3.keccak_256(signature.encode()).digest()[:4] + encode(split(types), values)
    call = {"to": address, "data": "0x" + data.hex()}
    found = await rpc(service.ready["upstream_url"], service, "eth_call", call, "latest")
    values = decode(split(gives), bytes.fromhex(found[2:]))
    return values[0] if len(values) == 1 else values


def split(types: str) -> list[str]:
    """Split a type list such as `address,(uint256,bytes)[],bool` into its parts."""
    parts, depth = [""], 0
    for letter in types:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


async def code_at(service: Service, address: str) -> str:
    return str(await rpc(service.ready["upstream_url"], service, "eth_getCode", address, "latest"))
