"""`prpc completion`: the script that lets a shell complete what is typed behind `prpc`.

The script asks `prpc` itself at every Tab, by COMPLETION_VARIABLE, so it is right for the commands
and options of whatever version is installed then.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from prpc_engine import cli
from prpc_engine.cli.commands import command, make_program

SHELLS = ("bash", "fish", "zsh")


@command(
    "completion",
    "Print a script that lets the shell complete commands, options and file names. Once, for all "
    "shells that are started afterwards:\n\n"
    "\b\n"
    "prpc completion bash > ~/.local/share/bash-completion/completions/prpc\n"
    "prpc completion fish > ~/.config/fish/completions/prpc.fish\n"
    'prpc completion zsh > "${fpath[1]}/_prpc"\n\n'
    "bash needs version 4.4 and its package bash-completion. For the shell that runs alone: "
    'eval "$(prpc completion bash)".',
)
@click.argument("shell", type=click.Choice(SHELLS))
def run(shell: str) -> int:
    """Print it."""
    kind = get_completion_class(shell)
    assert kind is not None  # for each of SHELLS
    print(kind(make_program(), {}, "prpc", cli.COMPLETION_VARIABLE).source())
    return cli.OK
