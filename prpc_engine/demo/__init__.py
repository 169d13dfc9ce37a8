"""The demo: who arrives late? A click-style model on 327,346 flights, trained through the key-value
service.

    settings, flights = Settings(), load_flights()
    create_tables(kv, settings)
    for progress in train(kv, flights, settings, rank, workers): ...
    evaluate(kv, prepare(flights.test, flights.vocabulary)).auc
    # against
    train_baseline(flights, settings).auc

Needs the extra: pip install "prpc-engine[demo]".
"""

from prpc_engine.demo.baseline import BaselineReport, train_baseline, trivial_auc
from prpc_engine.demo.data import Examples, Flights, load_flights
from prpc_engine.demo.model import Batch, auc, prepare
from prpc_engine.demo.settings import DemoSettings
from prpc_engine.demo.training import Evaluation, Progress, create_tables, evaluate, train

__all__ = [
    "BaselineReport",
    "Batch",
    "DemoSettings",
    "Evaluation",
    "Examples",
    "Flights",
    "Progress",
    "auc",
    "create_tables",
    "evaluate",
    "load_flights",
    "prepare",
    "train",
    "train_baseline",
    "trivial_auc",
]
