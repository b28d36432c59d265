"""An upstream in front of a real node that changes replies."""

from __future__ import annotations

import copy
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from tests.service import node_session

# Given a method, its params and the true result, returns the result to send. The node's errors have None as the result.
Lie = Callable[[str, list[Any], Any], Any]


def truth(method: str, params: list[Any], result: Any) -> Any:
    return result


class LyingUpstream:
    """Passes calls on to a node. `lie` changes the results."""

    def __init__(self, node: str, session: aiohttp.ClientSession) -> None:
        self._node = node
        self._session = session
        self.lie: Lie = truth
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        async with self._session.post(self._node, json=asked) as response:
            replied = await response.json()
        pairs = zip(asked, replied, strict=True) if isinstance(asked, list) else [(asked, replied)]
        for call, reply in pairs:
            given = self.lie(call["method"], call.get("params", []), reply.get("result"))
            if given is not None or "result" in reply:
                reply.pop("error", None)
                reply["result"] = given
        return web.json_response(replied)


@asynccontextmanager
async def lying_upstreams(nodes: list[str]) -> AsyncIterator[list[LyingUpstream]]:
    async with node_session() as session:
        found, runners = [], []
        for node in nodes:
            upstream = LyingUpstream(node, session)
            application = web.Application(client_max_size=1 << 24)
            application.router.add_post("/", upstream.answer)
            runner = web.AppRunner(application, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            upstream.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            found.append(upstream)
            runners.append(runner)
        try:
            yield found
        finally:
            for runner in runners:
                await runner.cleanup()


# Random lies


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for name, member in value.items() for leaf in _leaves(member, (*path, name))]
    if isinstance(value, list):
        return [path, *(leaf for index, member in enumerate(value) for leaf in _leaves(member, (*path, index)))]
    return [path]


def changed(value: Any, rng: random.Random) -> Any:
    """The value with one random part changed: a digit of a text, or an item of a list dropped or repeated."""
    leaves = [path for path in _leaves(value) if _at(value, path) not in (None, [], "0x", True, False)]
    if not leaves:
        return value
    path = rng.choice(leaves)
    return _replaced(copy.deepcopy(value), path, _other(_at(value, path), rng))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    _at(value, path[:-1])[path[-1]] = new
    return value


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list):
        index = rng.randrange(len(value))
        return value[:index] + value[index + 1 :] if rng.random() < 0.5 else [*value, value[index]]
    if not isinstance(value, str):
        return value + 1
    index = rng.randrange(min(2, len(value) - 1), len(value))
    digit = rng.choice([each for each in "123456789abcdef" if each != value[index].lower()])
    return value[:index] + digit + value[index + 1 :]
