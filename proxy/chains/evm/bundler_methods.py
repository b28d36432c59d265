"""The methods of a bundler (ERC-7769), as a family. Those that are not in `config/methods` do not exist on /bundler.

No result is cached, because the results for an operation change when it is mined. A send is a write: it is never
repeated after it may have been sent. Errors pass unchanged, because their codes are defined by the ERC.
"""

from __future__ import annotations

from proxy.chains.evm import reached_contracts
from proxy.chains.evm.address import FORMAT
from proxy.chains.evm.head_reader import HEAD
from proxy.chains.family import NONE, BlockRef, Family, Method
from proxy.core.caching import Lifetime
from proxy.core.upstream_errors import matching

SEND = "eth_sendUserOperation"
ESTIMATE = "eth_estimateUserOperationGas"
BY_HASH = "eth_getUserOperationByHash"
RECEIPT = "eth_getUserOperationReceipt"
# ERC-7769, from -32500 (the EntryPoint refuses) to -32508 (the paymaster cannot pay), and one that bundlers use as well:
# -32521, the call would revert.
VERDICTS = frozenset((*range(-32508, -32499), -32521))


def _no_block(method: Method, params: bytes) -> BlockRef:
    return NONE


def _not_kept(method: Method, params: bytes, result: bytes, ref: BlockRef, head: int, final: int) -> Lifetime:
    return "never"


def _is_empty(method: Method, result: bytes) -> bool:
    return result == b"null"


BUNDLER = Family(
    name="erc4337",
    block_ref=_no_block,
    lifetime=_not_kept,
    is_empty=_is_empty,
    head=HEAD,
    addresses=FORMAT,
    contracts=reached_contracts.of_call,
    error_rules=(matching("rejected", codes=VERDICTS),),
)
