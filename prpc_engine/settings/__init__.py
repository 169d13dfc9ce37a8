"""What a process is told before it starts: files, environment, arguments, and the addresses and
names in them.

node_config                 NodeConfig, everything a node is told, checked where its layers meet
sections, layers            what it consists of; what file, environment and arguments say
config_file, config         the file; secrets, TLS and single checks
network                     the variables about cores, and those of a cluster's task
local_job, user_secret      what processes of one job, of one user share
address                     where a node listens
nodelist                    Slurm's
cluster_spec, endpoint_map  tasks, and where they are
allow                       who may call what
"""
