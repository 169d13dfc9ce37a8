"""What a worker may see, and that each push counts once.

consistency        async, sync, ssp
progress           who is at which step
barrier_scheduler  who waits
paced_table        a table that waits
ledger             which pushes have been applied
epochs, versions   what a worker has seen
durable            when a push is answered
cache              rows that a worker keeps for a bounded time
skew               who is slow, and which server has most to do
"""
