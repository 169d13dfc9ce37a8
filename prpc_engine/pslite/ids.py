"""Who is who in a job of ps-lite's kind: node ids, groups, ranges of keys. Numbers in, numbers out.

    id or group   who
    1             the scheduler, and the group of it alone
    2             group: all servers
    4             group: all workers
    3, 5, 6, 7    groups: the sums of those; 7 is everybody
    rank*2 + 8    a server: 8, 10, 12, ...
    rank*2 + 9    a worker: 9, 11, 13, ...

With DMLC_GROUP_SIZE g each server and worker process has g instances, and the ids are theirs: the
rank of instance i of process r is r*g + i.

Servers divide all of uint64 among them: range i is [MAX // n * i, MAX // n * (i + 1)), and the last
one ends with the last key.
"""

from __future__ import annotations

from typing import NamedTuple

from prpc_engine.errors import ConfigError

SCHEDULER, SERVER_GROUP, WORKER_GROUP = 1, 2, 4
ALL = SCHEDULER + SERVER_GROUP + WORKER_GROUP
FIRST_SERVER, FIRST_WORKER = 8, 9
KEY_MAX = (1 << 64) - 1
ROLES = ("scheduler", "server", "worker")
JOINT = "joint"  # a server and a worker in one process
GROUP_OF = {"scheduler": SCHEDULER, "server": SERVER_GROUP, "worker": WORKER_GROUP}


class KeyRange(NamedTuple):
    """Keys from `begin` up to, and without, `end`; the last one's end is 2**64."""

    begin: int
    end: int


def node_id(role: str, rank: int) -> int:
    """Of that server or worker; the scheduler has one id."""
    if role == "scheduler":
        return SCHEDULER
    return rank * 2 + (FIRST_SERVER if role == "server" else FIRST_WORKER)


def rank_of(node: int) -> int:
    """A node's number within its role; 0 for the scheduler."""
    return max((node - FIRST_SERVER) // 2, 0)


def role_of(node: int) -> str:
    """ "scheduler", "server" or "worker". Raises ConfigError for what is no node's id."""
    if node == SCHEDULER:
        return "scheduler"
    if node < FIRST_SERVER:
        raise ConfigError(
            f"{node} is no node's id: 1 is the scheduler, 8, 10, ... are servers, 9, 11, ... "
            "workers"
        )
    return "worker" if node % 2 else "server"


def name_of(node: int) -> str:
    """For texts: "scheduler", "server 0", "worker 3"."""
    role = role_of(node)
    return role if role == "scheduler" else f"{role} {rank_of(node)}"


def members(group: int, servers: int, workers: int) -> tuple[int, ...]:
    """The ids of a group, or the one of a node, ascending within each role. Raises ConfigError for
    an unknown one.
    """
    if 1 <= group <= ALL:
        scheduler = (SCHEDULER,) if group & SCHEDULER else ()
        of_servers = (
            tuple(node_id("server", rank) for rank in range(servers))
            if group & SERVER_GROUP
            else ()
        )
        of_workers = (
            tuple(node_id("worker", rank) for rank in range(workers))
            if group & WORKER_GROUP
            else ()
        )
        return scheduler + of_servers + of_workers
    count = (
        {"server": servers, "worker": workers}.get(role_of(group), 1)
        if group >= FIRST_SERVER
        else 0
    )
    if rank_of(group) >= count:
        raise ConfigError(
            f"{group} is no node or group of a job of {servers} servers and {workers} workers: "
            f"groups are 1 to 7, servers 8 to {2 * servers + 6}, workers 9 to {2 * workers + 7}"
        )
    return (group,)


def key_ranges(servers: int) -> tuple[KeyRange, ...]:
    """The keys of each server, in order of rank."""
    width = KEY_MAX // servers
    return tuple(
        KeyRange(width * rank, width * (rank + 1) if rank + 1 < servers else KEY_MAX + 1)
        for rank in range(servers)
    )
