// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ledger} from "./Ledger.sol";

/// A coin with ordinary transfers whose name, symbol and decimals calls revert.
contract MuteCoin is Ledger {
    error Nothing();

    function name() external pure returns (string memory) {
        revert Nothing();
    }

    function symbol() external pure returns (string memory) {
        revert("no symbol");
    }

    function decimals() external pure returns (uint8) {
        revert();
    }
}
