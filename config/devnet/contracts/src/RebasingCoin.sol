// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// All balances grow at once without an event, so they cannot be computed by adding up transfers.
contract RebasingCoin {
    event Transfer(address indexed from, address indexed to, uint256 value);
    event Approval(address indexed owner, address indexed spender, uint256 value);
    event Rebase(uint256 perShare);

    string public constant name = "Rebasing Coin";
    string public constant symbol = "RBS";
    uint8 public constant decimals = 18;
    uint256 private constant ONE = 1e18;

    uint256 public perShare = ONE;
    uint256 public totalShares;
    mapping(address => uint256) public sharesOf;
    mapping(address => mapping(address => uint256)) public allowance;

    function totalSupply() external view returns (uint256) {
        return _amount(totalShares);
    }

    function balanceOf(address holder) external view returns (uint256) {
        return _amount(sharesOf[holder]);
    }

    /// Multiply every balance by `percent` / 100.
    function rebase(uint256 percent) external {
        perShare = (perShare * percent) / 100;
        emit Rebase(perShare);
    }

    function mint(address to, uint256 amount) external {
        uint256 shares = _shares(amount);
        totalShares += shares;
        sharesOf[to] += shares;
        emit Transfer(address(0), to, amount);
    }

    function approve(address spender, uint256 amount) external returns (bool) {
        allowance[msg.sender][spender] = amount;
        emit Approval(msg.sender, spender, amount);
        return true;
    }

    function transfer(address to, uint256 amount) external returns (bool) {
        return _move(msg.sender, to, amount);
    }

    function transferFrom(address from, address to, uint256 amount) external returns (bool) {
        allowance[from][msg.sender] -= amount;
        return _move(from, to, amount);
    }

    function _move(address from, address to, uint256 amount) private returns (bool) {
        uint256 shares = _shares(amount);
        sharesOf[from] -= shares;
        sharesOf[to] += shares;
        emit Transfer(from, to, amount);
        return true;
    }

    function _amount(uint256 shares) private view returns (uint256) {
        return (shares * perShare) / ONE;
    }

    function _shares(uint256 amount) private view returns (uint256) {
        return (amount * ONE) / perShare;
    }
}
