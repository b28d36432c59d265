"""Hooks of MkDocs: pages of the guide load one style sheet, and images have their size.

A browser draws a page after its style sheets, of which the theme has three. A diagram has no height until it has arrived.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Any

_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">\s*')
_IMAGE = re.compile(r'<img (?=[^>]*src="(?:[^"]*/)?images/([^"/]+\.svg)")')
_VIEW_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_CHARSET = re.compile(r'@charset "UTF-8";')
# The merged style sheets, by their path in the site.
_merged: dict[str, str] = {}


def on_post_page(output: str, *, config: Any, **_: Any) -> str:
    sheets = _STYLE.findall(output)
    # Links are relative to the page: "../assets/…".
    root = sheets[0].partition("assets/")[0]
    directories = [config["docs_dir"], *config["theme"].dirs]
    text = "\n".join(_CHARSET.sub("", _source(each.removeprefix(root), directories)) for each in sheets)
    name = f"assets/stylesheets/guide.{sha256(text.encode()).hexdigest()[:8]}.min.css"
    _merged[name] = text
    output = _STYLE.sub("", output).replace("</title>", f'</title><link rel="stylesheet" href="{root}{name}">', 1)
    return _IMAGE.sub(lambda found: f"{found[0]}{_size(Path(config['docs_dir']) / 'images' / found[1])} ", output)


def on_post_build(*, config: Any, **_: Any) -> None:
    for name, text in _merged.items():
        (Path(config["site_dir"]) / name).write_text(text, "utf-8")


def _source(name: str, directories: list[str]) -> str:
    return next(path for each in directories if (path := Path(each) / name).is_file()).read_text("utf-8")


def _size(image: Path) -> str:
    """Attributes by which a browser knows the image's shape before it has arrived; the theme scales it to the page."""
    found = _VIEW_BOX.search(image.read_text("utf-8"))
    return f'width="{found[1]}" height="{found[2]}"' if found else ""
