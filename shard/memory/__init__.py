"""Memory that processes share: rings of records, slabs of blocks, the segments under both.

segment       a sealed memfd, mapped
memory_room   what the host still has
huge_pages    what backs it
ring          records from one producer to one consumer
handle        a ring by name
memory_order  when the other side sees a store
slab          blocks that are lent to peers
arena         blocks within a segment
leases, lease_table, borrowers
              who holds which
counters      figures that another process reads while they change
limits        how much of all this a peer may hold
"""
