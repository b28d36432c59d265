"""Log filtering: one block of logs matched against many different filters, in this process."""

import random
import time
from dataclasses import dataclass

from proxy.chains.evm.log_filter import LogFilter, LogFilterIndex, parse

FILTERS = 10_000
LOGS = 1_000
ADDRESSES = 5_000
TOPICS = 500


@dataclass(frozen=True, slots=True)
class Log:
    address: str
    topics: tuple[str, ...]


def milliseconds() -> float:
    """Return the milliseconds to match one block of logs."""
    chance = random.Random(4)
    index = LogFilterIndex()
    while len(index) < FILTERS:
        index.add(_filter(chance))
    logs = [_log(chance) for _ in range(LOGS)]
    began = time.perf_counter()
    found = index.match(logs)
    took_s = time.perf_counter() - began
    _check(found, logs)
    return took_s * 1000


def _filter(chance: random.Random) -> LogFilter:
    """A typical client filter: a contract, a contract and an event, or an account's event on any contract."""
    match chance.randrange(4):
        case 0:
            return parse({"address": [_address(chance) for _ in range(chance.randint(1, 4))]})
        case 1:
            return parse({"address": _address(chance), "topics": [_topic(chance)]})
        case 2:
            return parse({"topics": [_topic(chance), _topic(chance)]})
        case _:
            return parse({"address": _address(chance), "topics": [_topic(chance), None, _topic(chance)]})


def _log(chance: random.Random) -> Log:
    return Log(_address(chance), tuple(_topic(chance) for _ in range(chance.randint(1, 4))))


def _address(chance: random.Random) -> str:
    return f"0x{chance.randrange(ADDRESSES):040x}"


def _topic(chance: random.Random) -> str:
    return f"0x{chance.randrange(TOPICS):064x}"


def _check(found: dict[LogFilter, list[int]], logs: list[Log]) -> None:
    """Check a sample of the matches against `LogFilter.matches`."""
    for given, places in list(found.items())[:50]:
        assert places == [index for index, log in enumerate(logs) if given.matches(log)]
