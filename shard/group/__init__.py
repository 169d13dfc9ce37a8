"""A group of pinned processes, the shards, that call functions in one another.

group               the application's side
group_calls         what it runs in its shards for itself
group_end           how its work ends when it is closed
group_statistics    what it tells of itself
sharded             one object in every shard
supervisor          starts processes and starts them again
restart             when
process             what a shard does from its start to its end
pipe                items from shards to one shard, at its pace
number_set          numbers of pipes that have ended
mesh                calls between shards
payload, functions  how values and functions are sent
keywords            functions that are called with keyword arguments
lane_handoff        lanes of a shard that was started again
cpu, topology       which core a shard is pinned to
core_locks          cores that other groups of the host have taken
"""
