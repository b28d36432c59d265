// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

struct PackedUserOperation {
    address sender;
    uint256 nonce;
    bytes initCode;
    bytes callData;
    bytes32 accountGasLimits;
    uint256 preVerificationGas;
    bytes32 gasFees;
    bytes paymasterAndData;
    bytes signature;
}

interface IStake {
    function depositTo(address account) external payable;
    function addStake(uint32 unstakeDelaySec) external payable;
    function balanceOf(address account) external view returns (uint256);
    function withdrawTo(address payable to, uint256 amount) external;
}

/// Pays for operations that its signer has signed. For EntryPoint 0.8, whose package has no such paymaster. Data and signed hash
/// are the same as for 0.7: an address (20 bytes), two gas limits (16 bytes each), abi.encode(validUntil, validAfter), and a
/// signature (EIP-191) over everything else.
contract VerifyingPaymaster {
    // Offsets of the parts of paymasterAndData.
    uint256 private constant LIMITS = 20;
    uint256 private constant TIMES = 52;
    uint256 private constant SIGNATURE = 116;
    // Half of the curve's order: a signature with a larger s is malleable and is refused (EIP-2).
    uint256 private constant HALF_ORDER = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0;

    IStake public immutable entryPoint;
    address public immutable verifyingSigner;
    address public immutable owner = msg.sender;

    constructor(IStake entryPoint_, address signer) {
        entryPoint = entryPoint_;
        verifyingSigner = signer;
    }

    function validatePaymasterUserOp(PackedUserOperation calldata op, bytes32, uint256)
        external
        view
        returns (bytes memory context, uint256 validationData)
    {
        require(msg.sender == address(entryPoint), "Sender not EntryPoint");
        (uint48 validUntil, uint48 validAfter, bytes calldata signature) = parsePaymasterAndData(op.paymasterAndData);
        require(signature.length == 65, "VerifyingPaymaster: invalid signature length in paymasterAndData");
        bytes32 signed = keccak256(abi.encodePacked("\x19Ethereum Signed Message:\n32", getHash(op, validUntil, validAfter)));
        uint256 failed = _recover(signed, signature) == verifyingSigner ? 0 : 1;
        // ERC-4337: aggregator or failure (160 bits), validUntil (48), validAfter (48).
        return ("", failed | (uint256(validUntil) << 160) | (uint256(validAfter) << 208));
    }

    function getHash(PackedUserOperation calldata op, uint48 validUntil, uint48 validAfter) public view returns (bytes32) {
        return keccak256(
            abi.encode(
                op.sender,
                op.nonce,
                keccak256(op.initCode),
                keccak256(op.callData),
                op.accountGasLimits,
                uint256(bytes32(op.paymasterAndData[LIMITS:TIMES])),
                op.preVerificationGas,
                op.gasFees,
                block.chainid,
                address(this),
                validUntil,
                validAfter
            )
        );
    }

    function parsePaymasterAndData(bytes calldata data)
        public
        pure
        returns (uint48 validUntil, uint48 validAfter, bytes calldata signature)
    {
        (validUntil, validAfter) = abi.decode(data[TIMES:SIGNATURE], (uint48, uint48));
        signature = data[SIGNATURE:];
    }

    function deposit() external payable {
        entryPoint.depositTo{value: msg.value}(address(this));
    }

    function addStake(uint32 unstakeDelaySec) external payable {
        entryPoint.addStake{value: msg.value}(unstakeDelaySec);
    }

    function getDeposit() external view returns (uint256) {
        return entryPoint.balanceOf(address(this));
    }

    function withdrawTo(address payable to, uint256 amount) external {
        require(msg.sender == owner, "not the owner");
        entryPoint.withdrawTo(to, amount);
    }

    function _recover(bytes32 hash, bytes calldata signature) private pure returns (address) {
        (bytes32 r, bytes32 s) = abi.decode(signature[:64], (bytes32, bytes32));
        if (uint256(s) > HALF_ORDER) return address(0);
        return ecrecover(hash, uint8(signature[64]), r, s);
    }
}
