"""starknet.py, unmodified and with only a URL."""

import asyncio
import json
import sys

from starknet_py.net.client_errors import ClientError
from starknet_py.net.client_models import Call
from starknet_py.net.full_node_client import FullNodeClient

task = json.load(sys.stdin)


async def main() -> None:
    client = FullNodeClient(node_url=task["url"])
    latest = await client.get_block_with_tx_hashes(block_number="latest")
    try:
        await client.get_block_with_tx_hashes(block_number=99_999)
        missing = ""
    except ClientError as exc:
        missing = exc.code
    found = {
        "chain": await client.get_chain_id(),
        "number": await client.get_block_number(),
        "latest": hex(latest.block_hash),
        "nonce": await client.get_contract_nonce("0x1", block_number="latest"),
        "storage": await client.get_storage_at("0x1", 2, block_number=400),
        "called": await client.call_contract(Call(0x1, 0x5, [5]), block_number="latest"),
        "missing": missing,
    }
    json.dump(found, sys.stdout)


asyncio.run(main())
