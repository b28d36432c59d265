"""Reading the files that operators name. A device or a log that is named by mistake may have no end, so there is a bound."""

import errno
from pathlib import Path
from typing import Final

# Far more than settings, tables, lists and keys need.
MOST_BYTES: Final = 16 << 20


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Raises OSError, also for a file that has more bytes."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return content


def read_text(path: Path, *, replaced: bool = False) -> str:
    """Raises OSError or UnicodeDecodeError. `replaced`: bytes that are not UTF-8 become a character."""
    return read_bytes(path).decode("utf-8", "replace" if replaced else "strict")
