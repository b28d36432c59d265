"""Live chain events of each network: heads, logs, pending transactions and Solana's notifications.

Each worker has one feed per network. The feed queries and subscribes to the upstreams once for all listeners of the same
events. It is independent of WebSockets: a *topic* is one kind of event stream, a *listener* is one subscription to it.
"""
