"""A worker: from TableWorker.push() to a request for each partition.

worker             the verbs
catalog            tables that it knows
future             results
parameters         tensors of a model in tables
partition_client   pushes and pulls under way to one partition
locator            which server has it now
recovery           what follows a failure
session            what this worker has read and written
snapshot           arrays that a caller may keep
checkpoint_rounds  save() and restore()
local              a service that is in the same process
"""
