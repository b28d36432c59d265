// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ledger} from "./Ledger.sol";

/// A coin from before the standard was settled: its name and symbol are 32 bytes, not text.
contract OldCoin is Ledger {
    bytes32 public constant name = "Old Coin";
    bytes32 public constant symbol = "OLD";
    uint8 public constant decimals = 18;
}
