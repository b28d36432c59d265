"""A page with its small files inside, so that a browser draws it after one request.

Elements of the page that have the attribute `data-inline` are replaced by the content of the style sheet or script they refer
to. The Content-Security-Policy of the page allows exactly these texts, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

_ELEMENT = re.compile(rb'<(?:link rel="stylesheet" href|script src)="([^"]+)" data-inline>(?:</script>)?')
_TAGS = {"css": b"style", "js": b"script"}


@dataclass(frozen=True, slots=True)
class InlinedPage:
    """`styles` and `scripts`: sources for the policy."""

    html: bytes
    styles: str
    scripts: str

    @classmethod
    def of(cls, page: bytes, files: Mapping[str, bytes]) -> InlinedPage:
        """`files`: their content, by the names by which the page refers to them."""
        digests: dict[str, list[str]] = {"css": [], "js": []}

        def inlined(element: re.Match[bytes]) -> bytes:
            name = element[1].decode()
            content, kind = files[name], name.rpartition(".")[2]
            digests[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'")
            return b"<%b>%b</%b>" % (_TAGS[kind], content, _TAGS[kind])

        html = _ELEMENT.sub(inlined, page)
        return cls(html, " ".join(digests["css"]), " ".join(digests["js"]))
