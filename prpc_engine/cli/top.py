"""`prpc top`: the processes of a job as they are now, looked at again and again.

The master says which nodes and shards there are, and each of them is asked for its statistics over
the ordinary RPC.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import islice

import click
import msgspec

from prpc_engine import cli, errors
from prpc_engine.cli.commands import command, path
from prpc_engine.cli.top_screen import Screen, Tables, has_screen
from prpc_engine.cli.top_table import NodeAnswer, Row, rows
from prpc_engine.cli.visitor import visiting_node
from prpc_engine.master.client import MasterClient
from prpc_engine.master.registry import RANK_MAX, Member
from prpc_engine.node.node import Node
from prpc_engine.node.node_info import ABOUT_ROUTE, STATISTICS
from prpc_engine.rpc.message import method_key
from prpc_engine.settings.address import Address
from prpc_engine.settings.config import DEFAULT_ROOT, secret_from
from prpc_engine.settings.node_config import NodeConfig

INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3600.0
# for the master to answer: a person looks on, and it has most likely been there for long
MASTER_TIMEOUT_S = 3.0
# For one process to connect, at all of its addresses, and to answer. One that is stopped is known
# to the master as long as its lease holds (5 s by default), and two looks have to come by then.
TIMEOUT_S = 2.0
GONE = "its lease at the master has ended since the look before, or it has left"
# processes: those that hang keep the others waiting only when there are so many of them
ASKED_AT_ONCE_MAX = 32


@command(
    "top",
    "Watch a job: each of its nodes and shards, and its master, until Ctrl-C. Percentiles are "
    "those of handlers, and there only where RpcService(timing=True) measures them. A process that "
    "does not answer is listed with the reason. At a terminal: q quits, s sorts by the next column "
    "(S: by the one before), r reverses, arrows, page keys, home and end move.",
)
@click.argument("master", metavar="HOST:PORT")
@click.option("--root", default=DEFAULT_ROOT, metavar="NAME", help="of the job at that master")
@click.option("--interval", type=float, default=1.0, metavar="S", help="seconds between looks")
@click.option("--once", is_flag=True, help="two looks, an interval apart, one table, and no more")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="one JSON object a line: time_s, and rows with the columns' names",
)
@click.option(
    "--secret-file",
    type=path(),
    metavar="F",
    help="the job's secret (default: PRPC_SECRET_FILE, else PRPC_SECRET, else this user's)",
)
def run(
    master: str, root: str, interval: float, once: bool, as_json: bool, secret_file: str | None
) -> int:
    """Look, wait, look again. Raises ConfigError, MasterUnreachable, AuthenticationFailed."""
    if not (math.isfinite(interval) and INTERVAL_S_MIN <= interval <= INTERVAL_S_MAX):
        raise errors.ConfigError(
            f"--interval {interval}: {INTERVAL_S_MIN} to {INTERVAL_S_MAX:.0f} seconds are allowed"
        )
    address = str(Address.parse(master))
    config = NodeConfig.load(secret=None if secret_file is None else secret_from(None, secret_file))
    if as_json:
        with contextlib.closing(_looks(address, root, config, interval, _sleep)) as looks:
            for found in islice(looks, 1 if once else None):
                print(
                    json.dumps({"time_s": time.time(), "rows": [asdict(row) for row in found]}),
                    flush=True,
                )
        return cli.OK
    with (
        Screen() if not once and has_screen() else Tables() as shown,
        contextlib.closing(_looks(address, root, config, interval, shown.wait)) as looks,
    ):
        for found in islice(looks, 1 if once else None):
            shown.show(found)
    return cli.OK


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def _looks(
    address: str, root: str, config: NodeConfig, interval_s: float, wait: Callable[[float], bool]
) -> Generator[list[Row], None, None]:
    """The rows of each look after the first, until `wait` says that there is to be no other."""
    with (
        MasterClient(
            address, root, config.secret, label="prpc top", timeout_s=MASTER_TIMEOUT_S
        ) as master,
        visiting_node("prpc-top", config) as node,
        ThreadPoolExecutor(ASKED_AT_ONCE_MAX, "prpc-top") as pool,
    ):

        def look() -> tuple[float, list[NodeAnswer]]:
            return time.monotonic(), list(pool.map(partial(_ask, node), _processes(master)))

        then, before = look()
        while wait(interval_s):
            now, answers = look()
            there = {one.addresses[0] for one in answers}
            gone = [
                NodeAnswer(one.who, one.addresses, error=GONE)
                for one in before
                if one.addresses[0] not in there and one.error != GONE
            ]
            yield rows(before, answers + gone, now - then)
            then, before = now, answers


def _processes(master: MasterClient) -> list[NodeAnswer]:
    """Who there is, unasked."""
    shards: list[NodeAnswer] = []
    with contextlib.suppress(errors.NoSuchNode):  # none has begun to serve
        for name in master.tree_node_sub("/_shard_"):
            with contextlib.suppress(errors.NoSuchNode):  # it has ended meanwhile
                shards.append(
                    _shard(f"/_shard_/{name}", master.tree_node_get(f"/_shard_/{name}").value)
                )
    nodes = [
        NodeAnswer(f"rank {info.global_rank}", info.addresses)
        for info in master.get_comm_info()
        if info.addresses
    ]
    return [
        NodeAnswer("master", (f"tcp://{master.endpoint}",)),
        *sorted(nodes + shards, key=_order),
    ]


def _shard(path: str, value: str) -> NodeAnswer:
    """What the tree holds of a shard, which any member of the job may have put there."""
    try:
        member = msgspec.json.decode(value, type=Member)
    except msgspec.MsgspecError as error:
        return NodeAnswer(
            f"node {path}", (path,), error=f"{path} holds what no shard has put there: {error}"
        )
    return NodeAnswer(
        f"rank {member.rank}, shard",
        member.addresses or (path,),
        error="" if member.addresses else "it has no address",
    )


def _order(answer: NodeAnswer) -> tuple[int, str]:
    rank = answer.who.removeprefix("rank ").partition(",")[0]
    return int(rank) if rank.isdecimal() else RANK_MAX, answer.who


def _ask(node: Node, one: NodeAnswer) -> NodeAnswer:
    if one.error:
        return one
    try:
        peer = node.peer_at(one.addresses, TIMEOUT_S / len(one.addresses), one.who)
        figures = peer.request(
            ABOUT_ROUTE, STATISTICS, method_key(STATISTICS), (), TIMEOUT_S, False
        ).result()
    except errors.RpcError as error:
        return NodeAnswer(one.who, one.addresses, error=f"{type(error).__name__}: {error}")
    return NodeAnswer(one.who, one.addresses, figures)
