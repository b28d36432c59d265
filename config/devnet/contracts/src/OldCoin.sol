// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ledger} from "./Ledger.sol";

/// A coin that predates the final standard: its name and symbol are bytes32, not string.
contract OldCoin is Ledger {
    bytes32 public constant name = "Old Coin";
    bytes32 public constant symbol = "OLD";
    uint8 public constant decimals = 18;
}
