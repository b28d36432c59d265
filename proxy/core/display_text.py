"""Untrusted text made safe to display: anyone can write contracts and metadata.

Control characters, direction overrides and invisible characters are removed, white space becomes one space, and long
text is truncated. The result is still plain text: a page that includes it has to escape it.
"""

from __future__ import annotations

# Only this many times the limit is read, because cleaning a megabyte would cost too much.
_READ = 4
SYMBOL, NAME, DESCRIPTION = 64, 256, 10_000


def cleaned(text: str | None, limit: int) -> str | None:
    """The text, cleaned and truncated to this many characters; None if nothing is left."""
    if text is None:
        return None
    if text.isprintable() and 0 < len(text) <= limit and "  " not in text and text[0] != " " != text[-1]:
        return text
    text = text[: limit * _READ]
    if not text.isprintable():
        text = "".join([c if c.isprintable() else " " if c.isspace() else "" for c in text])
    return " ".join(text.split())[:limit].rstrip() or None
