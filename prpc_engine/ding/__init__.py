"""DI-engine's events over this engine: a message queue for `ditask --mq-type prpc`, with PyPI's
DI-engine and no change to a program; and its buffers in shared memory,
and its supervisor.

    hook       ->  register  ->  mq         (in the wheel: _prpc_ding_hook, by prpc_ding.pth)
    cli        ->  register                 prpc-ditask: torchrpc's options
    mq         ->  exchange
    exchange   ->  dialling  ->  link  ->  outlet
    exchange   ->  inlet
    greeting, place, hosts, rendezvous_file, device_map
    shm_buffer ->  value_slots              arrays in shared memory that are read whole
    supervisor ->  children  ->  child_channel    objects in processes or threads, and their methods

docs/guides/ding.md is the user's page.
"""

from __future__ import annotations

from prpc_engine.ding.children import ChildType, RecvPayload, SendPayload
from prpc_engine.ding.exchange import ExchangeStatistics
from prpc_engine.ding.mq import PrpcMQ
from prpc_engine.ding.shm_buffer import ShmBuffer, ShmBufferContainer
from prpc_engine.ding.supervisor import Supervisor

__all__ = [
    "ChildType",
    "ExchangeStatistics",
    "PrpcMQ",
    "RecvPayload",
    "SendPayload",
    "ShmBuffer",
    "ShmBufferContainer",
    "Supervisor",
]
