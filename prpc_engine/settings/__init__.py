"""What a process is told before it starts: files, environment, arguments, and the addresses and
names in them.

config                      RpcConfig and what it is read from
local_job, user_secret      what processes of one job, of one user share
address                     where a node listens
network                     which interfaces
nodelist                    Slurm's
cluster_spec, endpoint_map  tasks, and where they are
allow                       who may call what
"""
