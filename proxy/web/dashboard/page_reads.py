"""/account/reads and /admin/reads: everything that a page shows, in one request.

Each part is checked and read as if it had been requested alone, and has its own status. So if one part fails, its section of
the page shows the error, and the others show their data.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from multidict import MultiDict

from proxy.core.bounded_json import MAX_ECHO
from proxy.errors import Fault, InternalError, NotFound
from proxy.web.api_spec import ApiOperation, ApiSpec
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest, check_role
from proxy.web.rest.endpoint import RestReply

_PARAMETER = re.compile(r"\{([a-z_]+)\}")

log = logging.getLogger("penstock")


class _PartReader(NamedTuple):
    pattern: re.Pattern[str]
    operation: ApiOperation
    handler: SessionHandler


class PageReads:
    def __init__(self, spec: ApiSpec, handlers: Mapping[str, SessionHandler], *, site: str) -> None:
        """`handlers`: those of all operations that can be a part, by operation id. They must not include the operations here,
        so that a part cannot request further parts. `site`: the public URL of this installation, if it is known."""
        self._site = site
        operations = [operation for operation in spec.operations.values() if operation.id in handlers]
        # Paths with fewer parameters are matched first.
        operations.sort(key=lambda operation: operation.path.count("{"))
        self._readers = [_PartReader(_pattern(each.path), each, handlers[each.id]) for each in operations]

    def __repr__(self) -> str:
        return f"<PageReads of {len(self._readers)} operations>"

    def handlers(self) -> dict[str, SessionHandler]:
        return {"read_parts": partial(self.read, "/account"), "admin_read_parts": partial(self.read, "/admin")}

    async def read(self, root: str, request: SessionRequest) -> dict[str, Any]:
        async with asyncio.TaskGroup() as group:
            parts = [group.create_task(self._part(request, root + path)) for path in request.query["paths"]]
        return {"parts": [part.result() for part in parts]}

    async def _part(self, request: SessionRequest, path: str) -> dict[str, Any]:
        try:
            return {"status": 200, "body": await self._data(request, path)}
        except Fault as fault:
            return self._failed(fault)
        except Exception:
            log.exception("unhandled", extra={"path": path.partition("?")[0]})
            return self._failed(InternalError("internal error; give the request id to the operator"))

    def _failed(self, fault: Fault) -> dict[str, Any]:
        return {"status": fault.status, "body": fault.body(self._site)}

    async def _data(self, request: SessionRequest, text: str) -> Any:
        path, _, query = text.partition("?")
        (_, operation, handler), parameters = self._find(path)
        check_role(request.who, operation)
        given = operation.check_parameters(parameters, MultiDict(parse_qsl(query, keep_blank_values=True)))
        result = await handler(replace(request, path=given[0], query=given[1], body=None))
        return result.data if isinstance(result, RestReply) else result

    def _find(self, path: str) -> tuple[_PartReader, dict[str, str]]:
        for reader in self._readers:
            if matched := reader.pattern.fullmatch(path):
                return reader, {name: unquote(value) for name, value in matched.groupdict().items()}
        raise NotFound(f"there is nothing to read at {path[:MAX_ECHO]}", reason="path")


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(_PARAMETER.sub(r"(?P<\1>[^/]+)", template))
