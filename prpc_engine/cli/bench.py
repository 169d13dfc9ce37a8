"""`prpc bench`: the measurements of perf/, from the command line."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from prpc_engine.bundled import benchmarks_package, bundled
from prpc_engine.cli.commands import command, path
from prpc_engine.errors import ConfigError

SUBJECTS = {
    "ring": "records between two processes through a ring in shared memory",
    "shard": "calls, lent arrays, wake-ups and idling of a group of shards",
    "growth": "how cost grows with shards, record sizes and a mesh",
    "rpc": "small calls",
    "call": "what a small call executes, in one thread",
    "start": "the first call of a fresh process, in parts",
    "clients": "1 to 1,000 clients on one server over tcp",
    "connections": "1 to 1,000 connections to a server of 1, 2 and 4 shards",
    "cores": "calls of 1 to 8 processes to a service of 1, 2, 4 and 8 shards",
    "mixed": "small calls beside large arrays on one connection",
    "tls": "calls and arrays over tcp with TLS and without",
    "rdma": "each verb on the RDMA port of this machine, both ends here",
    "failure": "how soon calls end at a killed server, and are answered after a reset",
    "recovery": (
        "elastic tables after a server was killed: how soon, and whether each push counts once"
    ),
    "simulation": "whole jobs on virtual time in one process: events a second",
    "tensor": "arrays, by reference and copied",
    "transfer": "arrays of 1 MB to 640 MB over tcp, of 1.25 KB to 1.25 GB over shared memory",
    "p2p": "functions and arrays of remote workers, in the sizes of DI-engine's tables",
    "fanout": "one array to 1 to 8 readers",
    "weights": "weights of a topic: what has changed, beside all of them",
    "fuse": "tensors of one step between two tasks of a cluster, one by one and fused",
    "kv": "pulls and pushes of a key-value table",
    "pslite": "ps-lite's verbs: small pushes, large values over shared memory and tcp, barriers",
    "checkpoint": (
        "saving and restoring key-value tables on tmpfs, beside files; pushes during a save"
    ),
    "tensorflow": "steps of training beside TensorFlow's own gRPC servers, the same script",
    "ding": "events of DI-engine beside its own queue over nng, and how many are lost",
}


@command(
    "bench",
    "Measure one subject in the same run as multiprocessing.Pipe, a raw tcp socket, and those of "
    "pyzmq, pynng, grpcio, mpi4py, iceoryx2 and torch that are installed (pip install "
    "'prpc-engine[bench]'; torch by itself).\n\n\b\n"
    + "\n".join(f"{name:12} {what}" for name, what in SUBJECTS.items()),
    epilog="--compare calls a figure better or worse where the ranges of its repeats, then and "
    "now, do not meet; two runs that differ by chance alone come apart so once in 126 times "
    "with five repeats each, once in ten with --quick. Ratios to a peer of the same run are "
    "compared between any two machines, times and rates only where CPU model, cores, kernel "
    "and Python are the same.",
)
@click.argument("subject", type=click.Choice(list(SUBJECTS)), metavar="SUBJECT")
@click.option("--json", "as_json", is_flag=True, help="JSON lines instead of tables")
@click.option(
    "--quick", is_flag=True, help="fewer and shorter repeats: figures to look at, not to publish"
)
@click.option(
    "--record",
    is_flag=True,
    help="append the figures to perf/history/<subject>.jsonl of this checkout",
)
@click.option(
    "--compare",
    is_flag=False,
    flag_value="",  # without a value
    metavar="[COMMIT|FILE]",
    help="show the figures beside those of that commit in perf/history/, or of a file that "
    "--json made; without a value: beside the last line of this machine, else the last line",
)
@click.option(
    "--from",
    "finished",
    type=path(),
    metavar="FILE",
    help="compare or record this run, which --json made, and measure nothing",
)
def run(
    subject: str,
    as_json: bool,
    quick: bool,
    record: bool,
    compare: str | None,
    finished: str | None,
) -> int:
    """Measure, print. Raises ConfigError."""
    if finished is not None and not record and compare is None:
        raise ConfigError("--from takes a finished run for --compare or --record; give one of them")
    package = benchmarks_package()
    try:
        cli_bench = importlib.import_module(f"{package}.cli_bench")
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.cli_bench"):
            raise
        raise ConfigError(
            f"no benchmarks here: {bundled('perf')} is missing; the wheel has them (pip install "
            "prpc-engine), and so does a checkout of the sources"
        ) from error
    code: int = cli_bench.main(
        subject,
        json=as_json,
        quick=quick,
        record=record,
        compare=compare,
        finished=None if finished is None else Path(finished),
    )
    return code
