"""An ordinary aiohttp proxy: Application, middleware, ClientSession. Usage: plain.py PORT UPSTREAM_PORT KEY"""

import sys
from collections.abc import AsyncIterator

import uvloop
from aiohttp import ClientSession, TCPConnector, web
from aiohttp.typedefs import Handler

KEYS = web.AppKey("KEYS", frozenset)
UPSTREAM = web.AppKey("UPSTREAM", str)
SESSION = web.AppKey("SESSION", ClientSession)


@web.middleware
async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.headers.get("X-API-Key") not in request.app[KEYS]:
        raise web.HTTPUnauthorized
    return await handler(request)


async def forward(request: web.Request) -> web.StreamResponse:
    call = await request.json()
    async with request.app[SESSION].post(request.app[UPSTREAM], json=call) as reply:
        return web.Response(body=await reply.read(), status=reply.status, content_type="application/json")


async def session(app: web.Application) -> AsyncIterator[None]:
    async with ClientSession(connector=TCPConnector(limit=0)) as opened:
        app[SESSION] = opened
        yield


def make_app(upstream_port: int, key: str) -> web.Application:
    app = web.Application(middlewares=[check_key], client_max_size=1 << 22)
    app[KEYS] = frozenset([key])
    app[UPSTREAM] = f"http://127.0.0.1:{upstream_port}/"
    app.cleanup_ctx.append(session)
    app.router.add_post("/v1/rpc/{chain}/{network}", forward)
    return app


if __name__ == "__main__":
    port, upstream_port, key = sys.argv[1:4]
    web.run_app(
        make_app(int(upstream_port), key),
        host="127.0.0.1",
        port=int(port),
        access_log=None,
        print=None,
        loop=uvloop.new_event_loop(),
    )
