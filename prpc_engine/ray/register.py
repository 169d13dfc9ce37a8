"""Ray is told of the transport: once in each process that makes actors; those hear of it from
there.
"""

from __future__ import annotations

from typing import Any

from prpc_engine.errors import ConfigError

NAME = "prpc"


def register(name: str = NAME, data_type: type[Any] | None = None) -> None:
    """Make `tensor_transport=name` known to Ray, for actors that this process makes from now on.
    Again, with the same data type: does nothing.

    data_type  torch.Tensor, which None means, or numpy.ndarray: what of a result travels so. Each
               needs a name of its own. A tensor arrives as the receiver's own; an array read-only,
               without a copy where both actors are on one host

    Raises ConfigError for another type, for a name that Ray has for another transport, and without
    Ray 2.60 or later, or torch where that is what is to travel.
    """
    try:
        from ray.experimental.rdt import register_tensor_transport
        from ray.experimental.rdt.util import transport_manager_info

        from prpc_engine.ray.transport import TRANSPORTS, data_type_name

        type_of_tensors = data_type or TRANSPORTS["torch.Tensor"].data_type()
    except ImportError as error:
        raise ConfigError(
            "prpc_engine.ray is for Ray 2.60 or later, with torch where no other data_type is "
            f"given; this Python lacks one ({error}): pip install 'prpc-engine[ray,torch]'"
        ) from error
    wanted = data_type_name(type_of_tensors)
    if wanted not in TRANSPORTS:
        raise ConfigError(f"data_type={data_type!r:.100}: {' and '.join(TRANSPORTS)} are allowed")
    transport = TRANSPORTS[wanted]
    known = transport_manager_info.get(name.upper())
    if known is not None:
        if known.transport_manager_class is transport:
            return
        raise ConfigError(
            f"Ray has a transport {name.upper()!r} already, "
            f"{known.transport_manager_class!r:.100}: register(name=...) takes another name for "
            f"{wanted}"
        )
    register_tensor_transport(name, ["cpu"], transport, type_of_tensors)
