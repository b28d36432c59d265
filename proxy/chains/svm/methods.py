"""The methods of Solana and its kin. A write is never repeated: a signature that may have landed must not be sent again."""

from __future__ import annotations

from proxy.chains.family import Family, Method, table

SVM = Family(
    "svm",
    table(
        *(
            Method(name)
            for name in (
                "getAccountInfo", "getBalance", "getBlock", "getBlockCommitment", "getBlockHeight",
                "getBlockProduction", "getBlocks", "getBlocksWithLimit", "getBlockTime", "getClusterNodes",
                "getEpochInfo", "getEpochSchedule", "getFeeForMessage", "getFirstAvailableBlock",
                "getGenesisHash", "getHealth", "getHighestSnapshotSlot", "getIdentity", "getInflationGovernor",
                "getInflationRate", "getInflationReward", "getLargestAccounts", "getLatestBlockhash",
                "getLeaderSchedule", "getMaxRetransmitSlot", "getMaxShredInsertSlot",
                "getMinimumBalanceForRentExemption", "getMultipleAccounts", "getProgramAccounts",
                "getRecentPerformanceSamples", "getRecentPrioritizationFees", "getSignaturesForAddress",
                "getSignatureStatuses", "getSlot", "getSlotLeader", "getSlotLeaders",
                "getStakeMinimumDelegation", "getSupply", "getTokenAccountBalance",
                "getTokenAccountsByDelegate", "getTokenAccountsByOwner", "getTokenLargestAccounts",
                "getTokenSupply", "getTransaction", "getTransactionCount", "getVersion", "getVoteAccounts",
                "isBlockhashValid", "minimumLedgerSlot", "simulateTransaction",
            )
        ),
        *(Method(name, "write") for name in ("sendTransaction", "requestAirdrop")),
        *(
            Method(name, "subscription")
            for name in (
                "slotSubscribe", "slotUnsubscribe", "accountSubscribe", "accountUnsubscribe", "logsSubscribe",
                "logsUnsubscribe", "signatureSubscribe", "signatureUnsubscribe",
            )
        ),
    ),
)  # fmt: skip
