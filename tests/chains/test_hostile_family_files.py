"""Files of families and methods with random faults: each is refused with its file and line and a reason, and never with a
traceback. PENSTOCK_HOSTILE_FILES sets how many are tried."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from proxy.settings import CONFIG
from proxy.settings.family_files import load_families
from proxy.settings.method_files import load_methods
from tests.shipped_tables import TABLES

FILES = int(os.environ.get("PENSTOCK_HOSTILE_FILES", 200))
VALUES = (
    *('""', '"x"', '"{"', '"{number}"', '"GET /"', '"GET /a/{b}"', '"GET /../a"', '"\\u00e9"', '"body."', '"a..b"'),
    *("0", "-1", "1e400", "nan", "99999999999999999999", "true", "[]", "{}", "[[]]", "[{}]", "{ a = 1 }", "1979-05-27"),
    *('["a", "a"]', '"[0]"', '"headers"', "'''x\ny'''"),
)
NAMES = ("colour", "name", "params", "rest", "types", "a.b", '"GET /x"', '"a.b"')
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\b[a-z_]+\b|\d+(?:\.\d+)?|[\[\]{}=,]')
# Faults about something that is not in the file.
ABSENT = ("is a required property", "like the file's name", "not valid TOML")


def with_fault(text: str, chance: random.Random) -> str:
    """Leave out, repeat or add a line, or replace a word or a value."""
    lines = text.splitlines()
    at = chance.randrange(len(lines))
    match chance.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(chance.randrange(len(lines)), lines[at])
        case 2:
            lines.insert(at, f"{chance.choice(NAMES)} = {chance.choice(VALUES)}")
        case kind:
            if found := [*TOKEN.finditer(lines[at])]:
                token = chance.choice(found)
                other = chance.choice(VALUES) if kind == 3 else chance.choice(TOKEN.findall(text))
                lines[at] = lines[at][: token.start()] + other + lines[at][token.end() :]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("kind", ["families", "methods"])
def test_file_with_random_faults_is_refused_with_its_line_or_is_good(kind: str, tmp_path: Path) -> None:
    chance, refused = random.Random(kind), 0
    for _ in range(FILES):
        shipped = chance.choice(sorted((CONFIG / kind).glob("*.toml")))
        text = shipped.read_text("utf-8")
        for _ in range(chance.choice([1, 1, 1, 2, 4])):
            text = with_fault(text, chance)
        file = tmp_path / shipped.name
        file.write_text(text, "utf-8")
        faults: list[str] = []
        if kind == "families":
            load_families([file], faults)
        else:
            load_methods([file], TABLES.chains.families, faults)
        # Other families have no methods here.
        own = [fault for fault in faults if not fault.startswith("config/methods: there are no methods")]
        for fault in own:
            assert file.name in fault, (fault, text)
            assert "(line " in fault or "(at line " in fault or any(each in fault for each in ABSENT), (fault, text)
        refused += bool(own)
    assert FILES // 2 < refused < FILES
