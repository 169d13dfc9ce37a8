"""Which device of the receiver the tensors of a message are for.

The sender wraps the value: PlacedValue(value, DevicePlacement(...)). The wrapper is not sent; the
receiver gets the value. Tensors that are not wrapped, and those of devices that `targets` does not
name, arrive on the host, and the sending process is warned once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prpc_engine.cuda.direct_blocks import DirectBlocks
from prpc_engine.cuda.pool import Pool

HOST = -1  # as a device


@dataclass(frozen=True)
class DevicePlacement:
    """For one receiver.

    targets  its device, for one of ours; HOST may be either: a tensor of the host's memory that is
             to lie on its device, or one of a device that is to lie in its host's memory
    pool     of device memory that it can open; None: what is sent goes through the host
    direct   blocks that RDMA ports read, for a receiver that opens none
    """

    targets: Mapping[int, int] = field(default_factory=dict)
    pool: Pool | None = None
    direct: DirectBlocks | None = None


class PlacedValue(NamedTuple):
    """A value to send, and where its tensors go."""

    value: Any
    placement: DevicePlacement


_NOWHERE = DevicePlacement()
_of_thread = threading.local()


def current() -> DevicePlacement:
    """Of what this thread encodes."""
    found: DevicePlacement = getattr(_of_thread, "placement", _NOWHERE)
    return found


@contextlib.contextmanager
def placing(placement: DevicePlacement) -> Iterator[None]:
    """What this thread encodes meanwhile goes there."""
    before = current()
    _of_thread.placement = placement
    try:
        yield
    finally:
        _of_thread.placement = before
