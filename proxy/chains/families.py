"""The families by name, and the few methods whose answers mean more than themselves: explicit tables."""

from __future__ import annotations

from collections.abc import Callable

from proxy.chains.evm.methods import EVM
from proxy.chains.evm.transactions import hash_of_sent
from proxy.chains.family import Family
from proxy.chains.svm.methods import SVM

FAMILIES: dict[str, Family] = {family.name: family for family in (EVM, SVM)}

# How to ask an upstream how far it is.
HEAD_CALL = {"evm": "eth_blockNumber", "svm": "getSlot"}
# How to ask one which block its head is, where a family's blocks can be replaced by others of the same height.
HEAD_BLOCK_CALL = {"evm": ("eth_getBlockByNumber", b'["latest",false]')}
# How to ask which chain it is: the first block's hash is in the answer.
GENESIS_CALL = {"evm": ("eth_getBlockByNumber", b'["0x0",false]'), "svm": ("getGenesisHash", b"[]")}
# Methods whose result is the head's number, and those whose result may be the head itself.
HEAD_NUMBERS = frozenset({"eth_blockNumber"})
HEAD_BLOCKS = frozenset({"eth_getBlockByNumber"})
# Methods whose result names the block that something is in, perhaps before its head was seen.
TELL_BLOCKS = frozenset({"eth_getTransactionReceipt", "eth_getTransactionByHash"})
# Methods whose first item is an object, and whose block the second.
TAKE_OBJECTS = frozenset({"eth_call", "eth_estimateGas", "eth_createAccessList", "debug_traceCall"})
# Methods over a range of blocks, which upstreams limit.
BY_RANGE = frozenset({"eth_getLogs"})
# Sends that can be told apart by what they send: the same again is not an error.
HASH_OF_SENT: dict[str, Callable[[bytes], bytes | None]] = {"eth_sendRawTransaction": hash_of_sent}
