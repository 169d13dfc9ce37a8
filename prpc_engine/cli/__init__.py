"""The command line: `prpc <command> ...`, each command in a module of this package.

commands.py says which there are and how a module describes its own; console.py, probe.py,
visitor.py, local_cluster.py and settings.py are what commands share or are made of.

Exit codes: 0 it worked, 1 it did not, 2 the command line or a setting is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

import click

from prpc_engine.cli.commands import COMMANDS as COMMANDS
from prpc_engine.cli.commands import make_program
from prpc_engine.errors import ConfigError, RpcError
from shard import ShardError, escaped

OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130  # 130: 128 + SIGINT, as shells say it
READER_GONE = 141  # 128 + SIGPIPE: whoever read our output went away, as in `prpc doctor | head -1`
# Errors of the system that say that there is not enough of what `prpc doctor` counts.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
SCARCE = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, *NO_ROOM}
COMPLETION_VARIABLE = "_PRPC_COMPLETE"  # a shell asks with it what may follow on its command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Errors that have a name are told in one line on stderr."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    _prepare_output()
    program = make_program()
    if os.environ.get(COMPLETION_VARIABLE):
        program.main([*given], "prpc", COMPLETION_VARIABLE)  # prints, and ends the process
    try:
        # Not by program.main(), which has exit codes of its own for Ctrl-C and a closed pipe.
        with program.make_context("prpc", [*given] or ["--help"]) as context:
            # failpoint: cli.running
            code: int = program.invoke(context)
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as end:  # of --help and --version
        return end.exit_code if given else WRONG_USAGE
    except click.UsageError as error:
        return _tell_usage(error)
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
        return _tell(error, FAILED, _what_to_do(error, output_works=_forget_output()))


def _tell_usage(error: click.UsageError) -> int:
    """How the command is used, and what is wrong with this use: a line each."""
    name = "prpc"
    if error.ctx is not None:
        name = error.ctx.command_path
        print(error.ctx.get_usage(), file=sys.stderr)
    said = escaped(" ".join(error.format_message().split()))  # a list of choices has lines
    print(f"{name}: {said} (`{name} --help` says more)", file=sys.stderr)
    return WRONG_USAGE


def _what_to_do(error: OSError, *, output_works: bool) -> str:
    """What the line about an error of the system ends with."""
    if not output_works:
        return "; it is the output that cannot be written"
    if error.errno in NO_ROOM and error.filename is None:  # of a write, and an unbuffered output
        return "; of the output, if it goes to a file, else of what `prpc doctor` calls scarce"
    if error.errno in SCARCE:
        return "; the system refuses it: `prpc doctor` says what is scarce"
    return ""


def _prepare_output() -> None:
    """Whatever is printed can be: who starts us may have closed the output, and paths need not be
    text of its encoding.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _forget_output() -> bool:
    """Whether the output takes what is still buffered. Else that has nowhere to go, and the end of
    the interpreter would try once more.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return True
    with contextlib.suppress(OSError, ValueError):  # no descriptor at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return False


def _tell(error: Exception, code: int, more: str = "") -> int:
    first_line = str(error).partition("\n")[0]
    # the text may be a peer's
    print(f"prpc: {escaped(first_line) or type(error).__name__}{more}", file=sys.stderr)
    return code
