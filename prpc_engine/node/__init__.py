"""The process in the network: it listens, connects, and keeps one peer for every other node.

node         listeners and peers
ways         the transports that it listens with and connects by
attempts     connecting: one attempt a node at a time, shared by all who want that peer
node_info    what it answers of itself
held_values  what it holds for other nodes to fetch
ended        figures of connections that are over
slab         arrays in shared memory for the caller
"""
