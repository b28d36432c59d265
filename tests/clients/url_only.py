"""web3.py with a URL and nothing else."""

import json
import sys

from web3 import HTTPProvider, Web3

task = json.load(sys.stdin)
web3 = Web3(HTTPProvider(task["url"]))
found = {
    "chain_id": web3.eth.chain_id,
    "block": web3.eth.block_number,
    "balance": web3.eth.get_balance(Web3.to_checksum_address(task["address"])),
}
json.dump(found, sys.stdout)
