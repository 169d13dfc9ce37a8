"""The command line: `prpc <command> ...`, each command in a module of this package named like it,
"-" as "_".

A command's module has `add_parser(commands) -> None`, which describes its arguments, and
`run(args) -> int`, which does it and returns the exit code. Only the module of the command that was
asked for is imported.

Exit codes: 0 it worked, 1 it did not, 2 the command line or a setting is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import prpc_engine
from prpc_engine.errors import ConfigError, RpcError
from prpc_engine.settings.config import check_environment
from shard import ShardError, escaped

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

# whatever the environment says, and some of them tell what is wrong with it
LOOK_ONLY = ("config", "doctor", "gc", "version")
OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130  # 130: 128 + SIGINT, as shells say it
READER_GONE = 141  # 128 + SIGPIPE: whoever read our output went away, as in `prpc doctor | head -1`

# name of the command -> what it does
COMMANDS = {
    "demo": "train on real data over a cluster on this machine, and compare with one process",
    "bench": "measure this engine beside what else is installed",
    "doctor": "look at this machine: what is wrong, and what to do about it",
    "top": (
        "watch the nodes and shards of a job: rates, latencies, queues, leases, who waits for whom"
    ),
    "endpoint-map": "say where the data of each task of a TensorFlow-style cluster goes",
    "master": "serve names, ids, locks and barriers to the nodes of a job",
    "launch": "run a command as scheduler, servers and workers of ps-lite's kind on this machine",
    "run": (
        'run a script of TensorFlow with protocol="prpc", or a whole cluster of it on this machine'
    ),
    "config": "say what holds in this environment, and where it comes from",
    "gc": "remove shared memory that dead processes left behind",
    "version": "say which versions these are",
}


def _asked_for(arguments: Sequence[str]) -> str | None:
    """The command on the command line, if any: the first word that is no option."""
    for word in arguments:
        if not word.startswith("-"):
            return word if word in COMMANDS else None
    return None


def _module_of(command: str) -> ModuleType:
    return importlib.import_module(f"prpc_engine.cli.{command.replace('-', '_')}")


def make_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser for `prpc`; of the commands, only `command` knows its arguments."""
    parser = argparse.ArgumentParser(
        prog="prpc",
        description=(
            "Calls, tensors and key-value tables between processes, over shared memory and tcp."
        ),
        epilog="`prpc <command> --help` says more. Start with `prpc doctor`, then `prpc demo`.",
    )
    parser.add_argument("--version", action="version", version=f"prpc {prpc_engine.__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="<command>", required=True
    )
    for name, summary in COMMANDS.items():
        if name == command:
            _module_of(name).add_parser(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Errors that have a name are told in one line on stderr."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    _prepare_output()
    try:
        command = _asked_for(given)
        parser = make_parser(command)
        if not given:
            parser.print_help()
            return WRONG_USAGE
        try:
            args = parser.parse_args(given)
        finally:
            sys.stdout.flush()  # a help text, too, may find no room
        if args.command not in LOOK_ONLY:
            check_environment()
        code: int = _module_of(args.command).run(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _tell(error, WRONG_USAGE)
    except (RpcError, ShardError) as error:
        return _tell(error, FAILED)
    except KeyboardInterrupt:
        print("prpc: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return READER_GONE
    except OSError as error:
        # of the system, such as a full disk below the output, or no descriptor left
        _forget_output()
        return _tell(error, FAILED, "; the system refuses it: `prpc doctor` says what is scarce")


def _prepare_output() -> None:
    """Whatever is printed can be: who starts us may have closed the output, and paths need not be
    text of its encoding.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _forget_output() -> None:
    """What is still buffered has nowhere to go, and the end of the interpreter would try once
    more.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):  # no descriptor at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: Exception, code: int, more: str = "") -> int:
    first_line = str(error).partition("\n")[0]
    # the text may be a peer's
    print(f"prpc: {escaped(first_line) or type(error).__name__}{more}", file=sys.stderr)
    return code
