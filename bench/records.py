"""Records of requests: the CPU time that the decision and the record add to a call, in this process.

The hot path decides inline for calls that are not recorded (`web/front/reply_writer.py`); other paths ask the recorder. Both
are measured here as plain Python, compiled they take less. Writing happens in the background.
"""

import math
import time
from collections.abc import Callable

from proxy.core.access import ALL_SCOPES, Account, Key
from proxy.core.directives import Directives
from proxy.core.limits import BucketRates
from proxy.memory_budget import MemoryBudget
from proxy.services.request_recorder import MOST_OF_ACCOUNT, RequestRecorder
from proxy.services.rpc.finished_call import FinishedCall

NOT_RECORDED = "not recorded"
INLINE = "not recorded, inline"
RECORDED = "recorded"
CALLS = 200_000
EXPLAINED = Directives(explain=1)


def costs() -> dict[str, float]:
    """CPU microseconds per call."""
    recorder, key = _recorder(), _key()
    return {
        INLINE: _cpu_us(lambda: _inline(key.account, 0.0, recorder.slow_s), CALLS),
        NOT_RECORDED: _cpu_us(lambda: recorder.reason(key.account, 0.001, None, failed=False), CALLS),
        RECORDED: _recorded_us(key),
    }


def _recorded_us(key: Key) -> float:
    """As many as an account may have waiting, several times: more would be dropped."""
    rounds = 20
    return sum(_cpu_us(_recording(_recorder(), key), MOST_OF_ACCOUNT) for _ in range(rounds)) / rounds


def _recording(recorder: RequestRecorder, key: Key) -> Callable[[], None]:
    def record() -> None:
        recorder.record(
            FinishedCall(
                request_id="req_0123456789abcdef",
                key=key,
                network="ethereum/mainnet",
                took_s=0.001,
                method="eth_getBalance",
                units=10,
                cache="miss",
                size=60,
                block=20_000_000,
                directives=EXPLAINED,
                attempts=(("ethereum/mainnet#1", 0.0, 0.001, "answered"),),
            )
        )

    return record


def _inline(account: Account, took_s: float, slow_s: float) -> None:
    if account.unsampled <= 1 or took_s > slow_s:
        raise AssertionError
    account.unsampled -= 1


def _cpu_us(work: Callable[[], object], times: int) -> float:
    """The time of the work, without that of calling nothing as often."""
    spent = []
    for each in (_nothing, work):
        began = time.process_time()
        for _ in range(times):
            each()
        spent.append(time.process_time() - began)
    return max(0.0, spent[1] - spent[0]) / times * 1e6


def _nothing() -> None: ...


def _recorder() -> RequestRecorder:
    return RequestRecorder(MemoryBudget(1 << 27).of("records"), slow_s=1.0, is_on=True)


def _key() -> Key:
    account = Account(id="acct_1", plan="growth", day_limit=0, sample_every=1 << 40)
    account.unsampled = account.sample_every
    return Key(
        id="key_1",
        lineage="key_1",
        digest=b"",
        live=True,
        scopes=ALL_SCOPES,
        account=account,
        rate=BucketRates(0, 1, 1),
        disabled=False,
        expires_at=math.inf,
    )
