"""A process's part in a job: RpcService joins a master, serves objects and makes clients.

service           RpcService
serving           servers of this process
in_shard          the same in each shard
sharded_servers   one server made of all shards
shard_statistics  their figures
"""
