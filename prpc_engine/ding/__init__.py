"""DI-engine's events over this engine: a message queue for `ditask --mq-type prpc`, with PyPI's
DI-engine and no change to a program.

    hook       ->  register  ->  mq         (in the wheel: _prpc_ding_hook, by prpc_ding.pth)
    cli        ->  register                 prpc-ditask: torchrpc's options
    mq         ->  exchange
    exchange   ->  dialling  ->  link  ->  outlet
    exchange   ->  inlet
    greeting, place, hosts, rendezvous_file, device_map

docs/guides/ding.md is the user's page.
"""

from __future__ import annotations

from prpc_engine.ding.exchange import ExchangeStatistics
from prpc_engine.ding.mq import PrpcMQ

__all__ = ["ExchangeStatistics", "PrpcMQ"]
