"""prpc-ditask: DI-engine's ditask, with torchrpc's options, and `--mq-type prpc` by default.

    --init-method URL            taken, and not needed: nodes find each other by addresses
    --local-cuda-devices LIST    a GPU for each worker
    --cuda-device-map MAP        device_map.py
    --global_rank N              as --node-ids

All others are ditask's own.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import click

from prpc_engine.errors import RpcError

OPTIONS = {
    "--init-method": "Taken for torchrpc's sake: nodes find each other by their addresses.",
    "--local-cuda-devices": "The GPU of each worker, such as 0,1.",
    "--cuda-device-map": "Which of our GPUs sends to which of a node: NODE_LOCAL_PEER[,...].",
    "--global_rank": "As --node-ids.",
}


def main() -> Any:
    """Of the console script."""
    find_hook().install()
    try:
        command = extended(importlib.import_module("ding.entry").cli_ditask)
    except ImportError as error:
        sys.exit(f"prpc-ditask runs DI-engine, which cannot be imported: {error}")
    return command()


def find_hook() -> Any:
    """The module hook.py, which has a name of its own wherever this package is installed, and
    that alone.
    """
    try:
        return importlib.import_module("_prpc_ding_hook")
    except ModuleNotFoundError:  # a tree that was not installed
        return importlib.import_module("prpc_engine.ding.hook")


def extended(command: Any) -> Any:
    """ditask's command, with our options."""
    module = sys.modules["ding.entry.cli_ditask"]
    parallel: Any = sys.modules["ding.framework.parallel"]
    original = command.callback

    def run(
        init_method: str | None,
        local_cuda_devices: str | None,
        cuda_device_map: str | None,
        global_rank: str | None,
        **kwargs: Any,
    ) -> Any:
        if global_rank is not None and kwargs.get("node_ids") is None:
            kwargs["node_ids"] = global_rank
        more = {
            "init_method": init_method,
            "local_cuda_devices": local_cuda_devices,
            "cuda_device_map": cuda_device_map,
        }
        given = {name: value for name, value in more.items() if value is not None}

        def runner(*args: Any, **options: Any) -> Any:
            return parallel.Parallel.runner(*args, **options, **given)

        before = vars(module)["Parallel"]
        vars(module)["Parallel"] = SimpleNamespace(runner=runner)
        try:
            return original(**kwargs)
        except RpcError as error:
            raise click.ClickException(str(error)) from error
        finally:
            vars(module)["Parallel"] = before

    command.callback = run
    command.params += [click.Option([name], type=str, help=text) for name, text in OPTIONS.items()]
    for parameter in command.params:
        if parameter.name == "mq_type":
            parameter.default = "prpc"
    return command


if __name__ == "__main__":
    main()
