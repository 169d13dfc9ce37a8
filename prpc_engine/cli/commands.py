"""The commands of `prpc`: what there is, in which order, and how one of them is described.

A command's module is named like it, "-" as "_", and holds `run`, made by @command: its parameters
are its options, its result is the exit code. Only the module of the command that was asked for is
imported: for the others the group holds a stub with a name and a summary, which is all that
`prpc --help`, completion and the search for a misspelt name need.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import click

import prpc_engine
from prpc_engine.settings.config import check_environment

# They run whatever the environment says, and some of them tell what is wrong with it.
LOOK_ONLY = ("completion", "config", "doctor", "gc", "version")
WIDTH_MAX = 120  # of help: a summary fits into a line

# heading in `prpc --help` -> name of the command -> what it does
SECTIONS = {
    "Start here": {
        "doctor": "look at this machine: what is wrong, and what to do about it",
        "demo": "train on real data over a cluster on this machine, and compare with one process",
    },
    "Run a job": {
        "master": "serve names, ids, locks and barriers to the nodes of a job",
        "launch": "run a command as scheduler, servers and workers of ps-lite's kind on this "
        "machine",
        "run": 'run a script of TensorFlow with protocol="prpc", or a whole cluster of it on this '
        "machine",
        "endpoint-map": "say where the data of each task of a TensorFlow-style cluster goes",
    },
    "Look and measure": {
        "top": "watch the nodes and shards of a job: rates, latencies, queues, leases, who waits "
        "for whom",
        "config": "say what holds in this environment, and where it comes from",
        "bench": "measure this engine beside what else is installed",
        "version": "say which versions these are",
    },
    "Housekeeping": {
        "gc": "remove shared memory that dead processes left behind",
        "completion": "print a script that lets the shell complete commands and options",
    },
}
COMMANDS = {name: summary for section in SECTIONS.values() for name, summary in section.items()}


class Command(click.Command):
    """One that checks the environment first, unless it is to run whatever that says."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. Raises ConfigError."""
        if self.name not in LOOK_ONLY:
            check_environment()
        return super().invoke(ctx)


def command(
    name: str, description: str, **attributes: Any
) -> Callable[[Callable[..., int]], Command]:
    """Decorator: the function is the command `name`, its result the exit code.

    `attributes`: of click.Command.
    """
    return click.command(name, cls=Command, help=description, **attributes)


def path(**attributes: Any) -> click.Path:
    """The type of an option that names a file: a shell completes it, and the command looks at it.

    `attributes`: of click.Path.
    """
    return click.Path(readable=False, **attributes)


class Program(click.Group):
    """`prpc`: it imports a command's module when that command is on the command line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command in place of its stub, and the arguments behind its name."""
        name, stub, rest = super().resolve_command(ctx, args)
        return name, None if stub is None or name is None else load(name), rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in a help text, by sections."""
        width = max(map(len, COMMANDS))  # one column for all sections
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{width}}", what) for name, what in commands.items()])


def load(name: str) -> click.Command:
    """One of COMMANDS, with its module."""
    module = importlib.import_module(f"prpc_engine.cli.{name.replace('-', '_')}")
    found: click.Command = module.run
    return found


def make_program() -> Program:
    """The command line as a whole."""
    program = Program(
        "prpc",
        {name: click.Command(name, short_help=summary) for name, summary in COMMANDS.items()},
        no_args_is_help=False,
        help="Calls, tensors and key-value tables between processes, over shared memory and tcp.",
        epilog="`prpc <command> --help` says more. Start with `prpc doctor`, then `prpc demo`.",
        subcommand_metavar="<command> ...",
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": WIDTH_MAX,
            "show_default": True,
        },
    )
    return click.version_option(prpc_engine.__version__, message="prpc %(version)s")(program)
