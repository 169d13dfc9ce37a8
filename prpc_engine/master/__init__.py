"""The master: names, ranks, ids, locks and barriers of a job, remembered through kill -9. From the
ground up:

tree                the state: nodes that change by small steps
namespace           sessions with leases, and the changes they make
registry, refusals  ranks, services, servers and ids on top; what it says no to
locks_and_barriers  decided by the order of their nodes
journal             the steps on disk, and what a restart makes of them
protocol            targets and addresses that both sides know
methods, master     what the master answers; the server around it
session             a client's session: opened, kept alive, resumed
session_states      its life, as a table
opening             whether and when it is tried again
registration        what a session has registered, and registers again
watch               deltas of the tree, at the client
backend             the face another registry (ZooKeeper) would have
client              MasterClient: the verbs
"""
