"""The methods of EVM chains. What is not here is refused: `personal_*`, `admin_*`, `engine_*`, `eth_sign*` and the rest."""

from __future__ import annotations

from proxy.chains.family import Family, Method, table


def _reads(*names: str) -> tuple[Method, ...]:
    return tuple(Method(name) for name in names)


def _at_block(place: int, *names: str) -> tuple[Method, ...]:
    return tuple(Method(name, block_at=place) for name in names)


EVM = Family(
    "evm",
    table(
        *_reads(
            "web3_clientVersion", "web3_sha3", "net_version", "net_listening", "eth_chainId", "eth_syncing",
            "eth_protocolVersion", "eth_blockNumber", "eth_gasPrice", "eth_maxPriorityFeePerGas", "eth_blobBaseFee",
            "eth_getBlockByHash", "eth_getBlockTransactionCountByHash", "eth_getUncleCountByBlockHash",
            "eth_getUncleByBlockHashAndIndex", "eth_getTransactionByHash", "eth_getTransactionByBlockHashAndIndex",
            "eth_getTransactionReceipt", "eth_getLogs", "trace_filter", "trace_get", "trace_transaction",
            "trace_rawTransaction", "trace_replayTransaction", "debug_traceBlockByHash", "debug_traceTransaction",
            "debug_getRawTransaction",
        ),
        *_at_block(
            0,
            "eth_getBlockByNumber", "eth_getBlockTransactionCountByNumber", "eth_getUncleCountByBlockNumber",
            "eth_getUncleByBlockNumberAndIndex", "eth_getTransactionByBlockNumberAndIndex", "eth_getBlockReceipts",
            "trace_block", "trace_replayBlockTransactions", "debug_traceBlockByNumber", "debug_getRawBlock",
            "debug_getRawHeader", "debug_getRawReceipts",
        ),
        *_at_block(
            1,
            "eth_getBalance", "eth_getCode", "eth_getTransactionCount", "eth_call", "eth_estimateGas",
            "eth_createAccessList", "eth_simulateV1", "eth_feeHistory", "trace_callMany", "debug_traceCall",
        ),
        *_at_block(2, "eth_getStorageAt", "eth_getProof", "trace_call"),
        *(
            Method(name, "filter")
            for name in (
                "eth_newFilter", "eth_newBlockFilter", "eth_newPendingTransactionFilter", "eth_getFilterChanges",
                "eth_getFilterLogs", "eth_uninstallFilter",
            )
        ),
        *(
            Method(name, "write")
            for name in ("eth_sendRawTransaction", "eth_sendPrivateTransaction", "eth_cancelPrivateTransaction")
        ),
        *(Method(name, "subscription") for name in ("eth_subscribe", "eth_unsubscribe")),
    ),
)  # fmt: skip
