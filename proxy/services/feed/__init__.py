"""What happens on a network, told as it happens: heads, logs, pending transactions, and the notices of Solana.

One feed per network and worker. It asks and listens to the upstreams once for all who want the same, and knows nothing of
sockets: a *topic* is what can be listened to, a *listener* is whoever does.
"""
