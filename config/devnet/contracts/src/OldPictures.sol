// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// NFTs that predate ERC-165: only their events reveal the type. No token has a URI.
contract OldPictures {
    event Transfer(address indexed from, address indexed to, uint256 indexed tokenId);

    string public constant name = "Old Pictures";
    string public constant symbol = "OLDPIC";
    mapping(uint256 => address) public ownerOf;
    mapping(address => uint256) public balanceOf;

    function mint(address to, uint256 id) external {
        require(ownerOf[id] == address(0), "minted already");
        ownerOf[id] = to;
        balanceOf[to] += 1;
        emit Transfer(address(0), to, id);
    }

    function transferFrom(address from, address to, uint256 id) external {
        require(from == msg.sender && ownerOf[id] == from, "not yours");
        ownerOf[id] = to;
        balanceOf[from] -= 1;
        balanceOf[to] += 1;
        emit Transfer(from, to, id);
    }
}
