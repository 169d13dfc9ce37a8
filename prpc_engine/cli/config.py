"""`prpc config`: every setting that this environment makes, and where it comes from."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from prpc_engine import cli
from prpc_engine.bundled import bundled
from prpc_engine.cli.commands import command
from prpc_engine.cli.settings import all_settings, unread


@command(
    "config",
    "Say what holds for nodes and tasks that are started in this environment and folder, a setting "
    "a line: name, value, and where it comes from. Exit code 2 when one of them makes no sense. "
    "What a program passes as an argument goes before all of these. A secret is never shown.",
)
@click.option("--json", "as_json", is_flag=True, help="one JSON array: name, value, origin, error")
@click.option(
    "--example",
    is_flag=True,
    help="print configs/default.toml, each limit with its default and reason, to begin your own "
    "file for PRPC_CONFIG",
)
def run(as_json: bool, example: bool) -> int:
    """Print them; what is wrong on standard error, a line each."""
    if example:
        print((bundled("configs") / "default.toml").read_text(), end="")
        return cli.OK
    settings = all_settings()
    if as_json:
        print(json.dumps([asdict(setting) for setting in settings], indent=1))
    else:
        names, values = (
            max(len(getattr(one, column)) for one in settings) for column in ("name", "value")
        )
        for one in settings:
            print(f"{one.name:<{names}}  {one.value or '-':<{values}}  {one.origin}")
    errors = [setting.error for setting in settings if setting.error]
    for text in [*errors, *unread().values()]:
        print(f"prpc: {text}", file=sys.stderr)
    return cli.WRONG_USAGE if errors else cli.OK
