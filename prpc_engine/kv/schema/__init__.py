"""Which tables there are and where their partitions lie, as master, servers and workers agree on
it.

table_spec  a table as it is created
layout      how a worker cuts requests for it
schema      tables at the master
placement   which server has which partition
tree        paths at the master
beginnings  servers that began without rows
services    what tables need of a service
"""
