"""Deploys the contracts: sends the recipe's steps in order and checks that each one succeeded."""

from __future__ import annotations

from typing import Any

import aiohttp

from proxy.dev.recipe import RecipeStep
from proxy.errors import StartError

# A chain that takes longer for one reply has hung.
REPLY_S = 30.0
RECEIPTS_AT_ONCE = 100


async def deploy(url: str, steps: list[RecipeStep]) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=REPLY_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            sent = [(step, await _done(session, url, step)) for step in steps]
            await _check_receipts(session, url, [(step.what, hash_) for step, hash_ in sent if step.sends])
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise StartError([f"contracts: the development chain at {url} failed: {exc!r}"]) from None


async def _done(session: aiohttp.ClientSession, url: str, step: RecipeStep) -> Any:
    call = {"jsonrpc": "2.0", "id": 1, "method": step.method, "params": step.params}
    async with session.post(url, json=call) as response:
        answer = await response.json()
    if "result" not in answer:
        raise StartError([f"contracts: {step.what}: {answer.get('error')}"])
    return answer["result"]


async def _check_receipts(session: aiohttp.ClientSession, url: str, sent: list[tuple[str, str]]) -> None:
    """Check the receipts: a reverted transaction is mined too, and only its receipt shows the failure."""
    for first in range(0, len(sent), RECEIPTS_AT_ONCE):
        part = sent[first : first + RECEIPTS_AT_ONCE]
        calls = [
            {"jsonrpc": "2.0", "id": at, "method": "eth_getTransactionReceipt", "params": [hash_]}
            for at, (_, hash_) in enumerate(part)
        ]
        async with session.post(url, json=calls) as response:
            answers = {answer["id"]: answer.get("result") or {} for answer in await response.json()}
        if failed := [what for at, (what, _) in enumerate(part) if answers[at].get("status") != "0x1"]:
            raise StartError([f"contracts: failed on the development chain: {', '.join(failed)}"])
