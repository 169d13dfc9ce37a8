"""What the master and its clients say to each other; requests and notifications of the ordinary
RPC.

    to MASTER_TARGET  arguments                   answer
    open_session      session or 0, token,        [session, token, version of the tree]
                      lease_s, root, label, home
    heartbeat                                     how many notifications were pushed to the session
    end_session                                   whether there was one
    ask               request or 0, verb, its     the verb's
                      arguments, timeout_s
    watch             path, version known or -1   [version, pushes, whether a snapshot, items]
    unwatch           path                        whether it was watched

    to WATCH_TARGET (at the client, a notification)
    changed                    its number among the session's, items

A connection belongs to the session opened over it. A request is the client's number for what
changes something or waits: asked again under that number it is not served twice. Items of a
snapshot are [path, value, version of the node], parents first; else they are deltas: [version of
the tree, Kind.PUT or Kind.DELETE, path, value, version of the node]. A client that misses a number
of `changed` watches again from the version it knows.
"""

from __future__ import annotations

from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.settings.address import Address

MASTER_TARGET, WATCH_TARGET = 1, 2  # below what the registry gives to servers
# On top of what a verb waits at the master: the way there and back, and a turn of a busy master.
ANSWER_S = 2.0


MASTER_ROUTE = FixedRoute(MASTER_TARGET, "the master")
WATCH_ROUTE = FixedRoute(WATCH_TARGET, "a watcher")


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of "host:port", port 0 for any free one;
    raises ConfigError with what is allowed.
    """
    parsed = Address.parse(address, port_min=0)
    return parsed.host, parsed.port
