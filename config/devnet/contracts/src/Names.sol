// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// The part of the ENS registry that look-ups need. Any account may set any name.
contract NameRegistry {
    event NewResolver(bytes32 indexed node, address resolver);

    mapping(bytes32 => address) public resolver;
    mapping(bytes32 => address) public owner;

    function setResolver(bytes32 node, address resolver_) external {
        resolver[node] = resolver_;
        owner[node] = msg.sender;
        emit NewResolver(node, resolver_);
    }
}

/// A resolver for both directions: names to addresses (EIP-137) and addresses to names (EIP-181).
contract NameResolver {
    event AddrChanged(bytes32 indexed node, address a);
    event NameChanged(bytes32 indexed node, string name);

    mapping(bytes32 => address) public addr;
    mapping(bytes32 => string) public name;

    function setAddr(bytes32 node, address a) external {
        addr[node] = a;
        emit AddrChanged(node, a);
    }

    function setName(bytes32 node, string calldata name_) external {
        name[node] = name_;
        emit NameChanged(node, name_);
    }

    function supportsInterface(bytes4 id) external pure returns (bool) {
        return id == 0x01ffc9a7 || id == 0x3b3b57de || id == 0x691f3431;
    }
}
