// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// A price with the interface of Chainlink's aggregators. Without a set time, its answer is always current.
contract PriceFeed {
    event AnswerUpdated(int256 indexed current, uint256 indexed roundId, uint256 updatedAt);

    uint8 public immutable decimals;
    string public description;
    uint256 public constant version = 1;
    uint80 public round = 1;
    int256 private _answer;
    uint256 private _updatedAt;

    constructor(string memory description_, uint8 decimals_, int256 answer) {
        description = description_;
        decimals = decimals_;
        _answer = answer;
    }

    /// Set a new answer and its time; 0 means the time of the call.
    function set(int256 answer, uint256 updatedAt) external {
        round += 1;
        _answer = answer;
        _updatedAt = updatedAt;
        emit AnswerUpdated(answer, round, updatedAt);
    }

    function latestAnswer() external view returns (int256) {
        return _answer;
    }

    function latestRoundData()
        external
        view
        returns (uint80 roundId, int256 answer, uint256 startedAt, uint256 updatedAt, uint80 answeredInRound)
    {
        uint256 time = _updatedAt == 0 ? block.timestamp : _updatedAt;
        return (round, _answer, time, time, round);
    }
}
