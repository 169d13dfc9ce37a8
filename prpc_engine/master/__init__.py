"""The master: names, ranks, ids, locks and barriers of a job, remembered through kill -9. From the
ground up:

whereabouts  which process on which host someone is
tree         the state: nodes that change by small steps
namespace    sessions with leases, and the changes they make
registry     ranks, services, servers and ids on top
meetings     locks and barriers
journal      the steps on disk, and what a restart makes of them
protocol     targets and addresses that both sides know
methods      what the master answers; master, the server around it
session      a client's session: opened, kept alive, resumed
watch        deltas of the tree, at the client
backend      the face another registry (ZooKeeper) would have
client       MasterClient: the verbs
"""
