// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {ERC721} from "@openzeppelin/contracts/token/ERC721/ERC721.sol";
import {ERC721URIStorage} from "@openzeppelin/contracts/token/ERC721/extensions/ERC721URIStorage.sol";

/// An ERC-721 with a separate URI, of any kind, for each token. Any account may mint.
contract Pictures is ERC721URIStorage {
    uint256 public totalSupply;
    address public immutable owner = msg.sender;

    constructor() ERC721("Penstock Pictures", "PIC") {}

    function mint(address to, uint256 id, string calldata uri) external {
        totalSupply += 1;
        _mint(to, id);
        _setTokenURI(id, uri);
    }

    function burn(uint256 id) external {
        totalSupply -= 1;
        _update(address(0), id, msg.sender);
    }

    /// Change a token's URI.
    function repaint(uint256 id, string calldata uri) external {
        _requireOwned(id);
        _setTokenURI(id, uri);
    }
}
