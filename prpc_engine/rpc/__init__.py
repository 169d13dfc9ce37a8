"""One call over one connection, from the bytes of a request to the bytes of its answer.

message              the header
call, call_state     the caller's side; its states
pending              requests that outlive their connection
send_queue           what waits for one destination
job, job_state       the server's, where the answer comes later; its states
jobs                 which of those run, and which wait for a place
backoff              how long to pause after failures in a row
context              on whose behalf a handler runs
peer                 both sides of a connection
local_peer           the same, where both are one process
paths                which connection of several
server               methods and what becomes of a request
method, marks        what methods are declared as
deferred             answers that come later
timing               how long handlers take
stream               items in both directions
flow_control         how many may be under way
once, repeats        calls that run at most once however often they are asked
failure_codes, loss  how what went wrong is told
"""
