"""An upstream of the cost matrix as a process of its own: `deep_stub.py evm|svm PORT`.

`evm`: a deep history, of which it answers only short ranges. `svm`: a Solana upstream without a WebSocket.
"""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from proxy.settings import load_tables
from tests.costs.deep_upstream import HEAD, DeepUpstream, PolledSvmUpstream
from tests.rpc_upstreams import Chain, ScriptedUpstream
from tests.svm_upstreams import SvmChain

NETWORKS = {"evm": ("base", "mainnet"), "svm": ("solana", "mainnet")}


async def main(family: str, port: int) -> None:
    network = load_tables().chains.find(*NETWORKS[family])
    assert network is not None
    upstream: ScriptedUpstream
    if family == "evm":
        upstream = DeepUpstream(Chain(head=HEAD, identity=network.identity))
    else:
        upstream = PolledSvmUpstream(SvmChain(head=1000, identity=network.identity))
    upstream.port = port
    await upstream.open()
    while True:  # blocks and slots go on
        await asyncio.sleep(0.5)
        upstream.chain.head += 1


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
