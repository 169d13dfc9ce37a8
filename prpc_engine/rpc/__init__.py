"""One call over one connection, from the bytes of a request to the bytes of its answer.

message              the header
call                 the caller's side
job                  the server's
context              on whose behalf a handler runs
peer                 both sides of a connection
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
