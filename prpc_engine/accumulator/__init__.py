"""Counters of a whole job: every process writes for itself, servers merge, anybody reads.

    server:  AccumulatorServer(service)
    client:  client = AccumulatorClient(service)
             clicks = Accumulator("clicks", Sum)
             clicks.write(1)
             client.wait_empty()
             clicks.read().value

The walk of a value: accumulator -> counter (this process) -> client, outbox -> server, window ->
the counter there.
"""

from prpc_engine.accumulator.accumulator import Accumulator
from prpc_engine.accumulator.aggregator import Aggregator
from prpc_engine.accumulator.auc import AUC
from prpc_engine.accumulator.client import AccumulatorClient
from prpc_engine.accumulator.counter import CounterSet, default_counters
from prpc_engine.accumulator.histogram import Histogram
from prpc_engine.accumulator.moments import Timer
from prpc_engine.accumulator.numeric import Avg, KeyedAvg, Max, Min, Sum
from prpc_engine.accumulator.sender import AccumulatorStatistics
from prpc_engine.accumulator.server import AccumulatorServer, AccumulatorShard
from prpc_engine.accumulator.timers import AutoTimer, disable_timers, enable_timers, timer
from prpc_engine.accumulator.topk import Hit, TopK

__all__ = [
    "AUC",
    "Accumulator",
    "AccumulatorClient",
    "AccumulatorServer",
    "AccumulatorShard",
    "AccumulatorStatistics",
    "Aggregator",
    "AutoTimer",
    "Avg",
    "CounterSet",
    "Histogram",
    "Hit",
    "KeyedAvg",
    "Max",
    "Min",
    "Sum",
    "Timer",
    "TopK",
    "default_counters",
    "disable_timers",
    "enable_timers",
    "timer",
]
