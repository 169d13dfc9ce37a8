"""What DI-engine gets when it is asked for one of our names: a runner that gives each worker its
addresses, and the queue itself.

    name                              is
    prpc, prpc:cpu                    PrpcMQ
    torchrpc, torchrpc:cpu            the same, under the names of DI-engine's torchrpc
    prpc:cuda, torchrpc:cuda, cuda    the same where there is a CUDA device, else a RuntimeError;
                                      tensors on a GPU travel by the host's memory, as pickle does

    option of the runner                         becomes
    those of DI-engine                           what they are with nng
    attach_to of a node id, as torchrpc has it   the address of that worker of this launch
    init_method                                  nothing: nodes find each other by addresses
    use_cuda                                     as the name "cuda"
    local_cuda_devices, cuda_device_map          checked; GPUs are not mapped yet
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prpc_engine.ding.device_map import parse_device_map, parse_devices
from prpc_engine.ding.mq import PrpcMQ
from prpc_engine.ding.place import NodePlace
from prpc_engine.errors import ConfigError

logger = logging.getLogger("prpc")
CELL = "args_parsers"  # the table of DI-engine's runner: message queue -> who makes its arguments
OF_TORCHRPC = ("init_method", "use_cuda", "local_cuda_devices", "cuda_device_map")
OF_DI_ENGINE = "0.5.3"


def queue(mq_type: str, /, *args: Any, **kwargs: Any) -> PrpcMQ:
    """What the registry makes of that name. Raises RuntimeError for CUDA where there is none."""
    if mq_type.endswith("cuda"):
        check_cuda(mq_type)
    return PrpcMQ(*args, **kwargs)


def check_cuda(name: str) -> None:
    """Raises RuntimeError where no CUDA device is visible."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            f"--mq-type {name} needs a CUDA device, and torch {torch.__version__} sees none: "
            "use --mq-type prpc, or look at CUDA_VISIBLE_DEVICES and the driver"
        )
    logger.warning(
        "--mq-type %s: tensors on a GPU travel by the host's memory; they are not mapped from GPU "
        "to GPU yet",
        name,
    )


def runner(
    original: Callable[..., Any],
    cls: Any,
    workers: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Callable[..., Any]:
    """Parallel.runner() of DI-engine, for one of our names. Raises ConfigError and RuntimeError for
    options that do not fit, ImportError for another DI-engine.
    """
    asked = {name: kwargs[name] for name in OF_TORCHRPC if name in kwargs}
    theirs = {name: value for name, value in kwargs.items() if name not in asked}
    mq_type = args[0] if args else theirs["mq_type"]
    check_options(mq_type, asked, workers)
    run: Callable[..., Any] = original(cls, workers, *args, **theirs)
    table = inspect.getclosurevars(run).nonlocals.get(CELL)
    if not isinstance(table, dict):
        raise ImportError(
            "Parallel.runner of this DI-engine has no table of message queues: prpc-engine knows "
            f"version {OF_DI_ENGINE}"
        )
    table[mq_type] = lambda **arguments: workers_from(cls, arguments)
    return run


def check_options(mq_type: str, asked: Mapping[str, Any], workers: int) -> None:
    """Those of torchrpc. Raises ConfigError and RuntimeError."""
    devices, device_map = asked.get("local_cuda_devices"), asked.get("cuda_device_map")
    if devices is not None:
        parse_devices(devices, workers)
    if device_map is not None:
        text = device_map if isinstance(device_map, str) else ",".join(device_map)
        parse_device_map(text)
    is_cuda = asked.get("use_cuda") or devices is not None or device_map is not None
    if is_cuda or mq_type.endswith("cuda"):
        check_cuda(mq_type)


def workers_from(cls: Any, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """What each worker of a launch is told: as DI-engine does for nng, with who will attach to it,
    and its name.
    """
    attach_to = [str(one) for one in arguments.get("attach_to") or []]
    named = [one for one in attach_to if one.isdecimal()]
    for one in attach_to:
        if one not in named:  # here, since DI-engine hides what its workers' queues raise
            NodePlace.parse(one, "attach_to")
    arguments = {**arguments, "attach_to": [one for one in attach_to if not one.isdecimal()]}
    found: list[dict[str, Any]] = cls._nng_args_parser(**arguments)
    of_node = {str(each["node_id"]): each["listen_to"] for each in found}
    for one in named:
        if one not in of_node:
            raise ConfigError(
                f"--attach-to {one}: a node id is known within one launch alone, whose nodes are "
                f"{', '.join(of_node)}; of another launch give the address, such as "
                "tcp://host:50515"
            )
    for each in found:
        own = [of_node[one] for one in named if of_node[one] != each["listen_to"]]
        each["attach_to"] = list(dict.fromkeys([*each["attach_to"], *own]))
        each["name"] = f"node {each['node_id']}"
    for each in found:
        here = each["listen_to"]
        each["expects"] = [
            other["listen_to"]
            for other in found
            if here in other["attach_to"] and other["listen_to"] not in each["attach_to"]
        ]
    return found
