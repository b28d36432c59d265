"""The directories of the files that travel with the code: settings and chains in `config`, the API spec and SQL in `schemas`,
and the built guide.

In a checkout they are beside the package. In an installed package they are inside it: `setup.py` puts them into `data`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

_PACKAGE = Path(str(files("proxy")))
_INSTALLED = _PACKAGE / "data"
_ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent
CONFIG = _ROOT / "config"
SCHEMAS = _ROOT / "schemas"
# The built guide. A checkout has it after `make docs`.
GUIDE = _ROOT / ("guide" if _INSTALLED.is_dir() else "site")
