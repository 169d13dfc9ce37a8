"""Elastic tables: partitions that move, replicas that take over, and the log that keeps them equal.

elastic           ElasticServer
partition_router  which table answers a request
replica           one partition at one server
replica_role      what that partition is for there, as a table
replication_log   what a primary decided, in order
state_transfer    a whole partition to a server that had none
reconciler        what there should be and what there is: joins, losses, moves
"""
