"""The bodies of the benchmark's requests.

Every MARKER in a body becomes a number that no other request has. It is in the parameters if calls must differ, so that none
is cached or joined.
"""

from bench.loaders import MARKER

BATCH = 20
LARGE_BATCH = 100
BIG = 100 * 1024

OWN_ID = f'"id":{MARKER}'  # every reply must carry the id of its request


def _call(method: str, params: str, *, id_: str = MARKER) -> str:
    return f'{{"jsonrpc":"2.0","id":{id_},"method":"{method}","params":[{params}]}}'


def _address(last: str) -> str:
    return '"0x' + last.rjust(40, "0") + '"'


def small() -> str:
    return _call("eth_getBalance", _address(MARKER) + ',"latest"')


def bitcoin() -> str:
    """A small call to a node of Bitcoin, in the envelope of its clients."""
    return f'{{"jsonrpc":"1.0","id":{MARKER},"method":"gettxout","params":["{MARKER.rjust(64, "0")}",0,true]}}'


def same() -> str:
    """The same read in every request; only the ids differ."""
    return _call("eth_getBalance", _address("beef") + ',"latest"')


def old_block() -> str:
    """A reply that never changes: a block by hash, far below the head."""
    return _call("eth_getBlockByHash", f'"0xb10c{1:060x}",false')


def old_block_by_number() -> str:
    return _call("eth_getBlockByNumber", '"0x1",false')


def many_old_blocks() -> str:
    """An old block under a hash that never repeats: the stub takes the block number from the last 16 digits."""
    return _call("eth_getBlockByHash", f'"0xb10c{MARKER.rjust(44, "0")}{1:016x}",false')


def receipt() -> str:
    return _call("eth_getUserOperationReceipt", '"0x' + MARKER.rjust(64, "0") + '"')


def big_body() -> str:
    return _call("eth_sendRawTransaction", '"0x' + MARKER + "ab" * (BIG // 2) + '"')


def big_reply() -> str:
    return _call("eth_call", f'{{"to":{_address(MARKER)},"data":"0x70a08231"}},"latest"')


def code(size: int) -> str:
    """A call with a result of this size."""
    return _call("eth_getCode", f'"0x{MARKER.rjust(24, "0")}{size:016x}","latest"')


def batch(size: int = BATCH) -> str:
    calls = [
        _call("eth_getBalance", _address(f"{MARKER}{i:02d}") + ',"latest"', id_=f"{MARKER}{i:02d}") for i in range(size)
    ]
    return "[" + ",".join(calls) + "]"
