"""`prpc doctor`: what this machine offers, what is wrong with it, and what to do about that.

With --peer the same of the way to another node."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from prpc_engine import cli
from prpc_engine.cli.checks import Finding, Verdict, examine, examine_peer
from prpc_engine.cli.commands import command, path
from prpc_engine.cli.console import make_console
from prpc_engine.errors import ConfigError
from prpc_engine.settings.config import secret_from
from shard import escaped

COLOURS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "bad": "bold red"}


@command(
    "doctor",
    "Look at this machine. Exit code 1 when something is bad: the engine will not work like this. "
    "With --peer look at the way to another node instead: which transports connect, which one a "
    "client takes, and why not the others.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="one JSON array: fact, value, verdict, advice"
)
@click.option(
    "--peer",
    metavar="ADDRESS",
    help="host:port of a service or a master, or its shm:// address",
)
@click.option(
    "--secret-file",
    type=path(),
    metavar="F",
    help="the job's secret for --peer (default: PRPC_SECRET_FILE, else PRPC_SECRET, else this "
    "user's)",
)
def run(as_json: bool, peer: str | None, secret_file: str | None) -> int:
    """Examine, print."""
    if secret_file is not None and peer is None:
        raise ConfigError("--secret-file is for --peer alone")
    findings = (
        examine() if peer is None else list(examine_peer(peer, secret_from(None, secret_file)))
    )
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        show(findings)
    return cli.FAILED if any(finding.verdict == "bad" for finding in findings) else cli.OK


def show(findings: list[Finding]) -> None:
    """A table, and a line that sums it up."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=COLOURS[finding.verdict])
        table.add_row(
            verdict,
            *(Text(escaped(text)) for text in (finding.fact, finding.value, finding.advice)),
        )
    console = make_console()
    console.print(table)
    counts = {
        verdict: sum(finding.verdict == verdict for finding in findings) for verdict in COLOURS
    }
    console.print(
        f"{counts['ok']} ok, {counts['warn']} to look at, {counts['bad']} bad", highlight=False
    )
