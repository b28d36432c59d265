"""Plain English: comments, docstrings and documents keep three habits below half a sentence in a thousand words."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest

from tests.conventions.prose import Passage, passages, sentences, words_in

PER_THOUSAND = 0.5
_BEGINNING = re.compile(r"[\"'“(*_]*(What|Who|Whoever|Where|Of)\b")
_PERSON = re.compile(r"\b(whoever|nobody|somebody)\b", re.IGNORECASE)
_TOLD = re.compile(r"\b(told|tells)\b", re.IGNORECASE)
# This file and its helper name the words.
EXEMPT = {"tests/conventions/test_prose.py"}


def beginnings(text: str) -> int:
    return sum(1 for sentence in sentences(text) if _BEGINNING.match(sentence))


MARKERS: dict[str, Callable[[str], int]] = {
    "sentences that begin with What, Who, Whoever, Where, Of": beginnings,
    "whoever, nobody, somebody": lambda text: len(_PERSON.findall(text)),
    "told, tells": lambda text: len(_TOLD.findall(text)),
}


@cache
def checked() -> list[Passage]:
    return [passage for passage in passages() if passage.file not in EXEMPT]


@cache
def passages_of(part: str) -> tuple[list[Passage], int]:
    """The passages of a part, and the number of their words."""
    found = [passage for passage in checked() if part_of(passage) == part]
    return found, sum(words_in(passage.text) for passage in found)


def part_of(passage: Passage) -> str:
    """Each package is measured by itself, so that one cannot make up for another."""
    first = passage.file.split("/")[0]
    return first if passage.file.endswith(".py") else "documents"


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("part", ["proxy", "bench", "tests", "documents"])
def test_marker_is_rare(part: str, marker: str) -> None:
    found, total = passages_of(part)
    counts = [(passage, MARKERS[marker](passage.text)) for passage in found]
    places = [f"{passage.file}:{passage.line}" for passage, count in counts if count]
    rate = 1000 * sum(count for _, count in counts) / max(total, 1)
    assert rate <= PER_THOUSAND, f"{rate:.1f} in 1,000 words of {part}: {marker}\n" + "\n".join(places)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("What it does.", 1),
        ("It does this. Who asks, gets it.", 1),
        ("- Of these\n- one\n- Where", 2),
        ("See what it does, and where.", 0),
        ("Whatever. Office. Whose?", 0),
        ("A heading\n\nOf course", 1),
    ],
)
def test_beginnings_are_counted_by_sentence(text: str, count: int) -> None:
    assert beginnings(text) == count
