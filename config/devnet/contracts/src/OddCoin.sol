// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Ledger} from "./Ledger.sol";

/// A coin without decimals, with control characters in its name, and with malformed Transfer events.
contract OddCoin is Ledger {
    bytes32 private constant TRANSFER = keccak256("Transfer(address,address,uint256)");

    string public name = unicode"Odd\u0000\u0007\u001b[31m Coin\u202e\n";
    string public symbol = unicode"O\u0000DD\u200b";

    /// Emit a Transfer event with `topics` topics in total and the given `data`; no tokens move.
    function pretend(uint256 topics, bytes calldata data) external {
        bytes memory copy = data;
        bytes32 signature = TRANSFER;
        assembly ("memory-safe") {
            let at := add(copy, 32)
            let size := mload(copy)
            switch topics
            case 0 { log0(at, size) }
            case 1 { log1(at, size, signature) }
            case 2 { log2(at, size, signature, caller()) }
            case 3 { log3(at, size, signature, caller(), caller()) }
            default { log4(at, size, signature, caller(), caller(), not(0)) }
        }
    }
}
