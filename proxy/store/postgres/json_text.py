"""JSON for parameters of type jsonb, which asyncpg takes as text."""

from __future__ import annotations

from typing import Any

import orjson


def json_text(value: Any) -> str:
    return orjson.dumps(value).decode()
