"""The whole data plane in virtual time, from a seed, with an oracle that checks every reply.

A worker is built as in production and runs unchanged on an event loop that never sleeps, with connections in memory, simulated
upstreams and simulated clients. One seed gives one history, byte for byte.

    python -m tests.simulation --seeds 40
    python -m tests.simulation --seed 7 --timeline    one seed, with what happened in it
"""
