"""What the nursery of TensorFlow's programs (tests/forked.py) imports: as install() does it, with
the field of ConfigProto, but none of its hooks.

TensorFlow's runtime starts its threads, opens what it keeps, and seeds its random numbers when it
is first asked for anything. Importing TensorFlow does not, which is looked at here: what is forked
of this process is as clean as a new one. How much is logged is read when it is imported: all is.
"""

from __future__ import annotations

import importlib
import os

from prpc_engine.tensorflow.proto import with_field

with with_field():
    import tensorflow as tf
from tensorflow.python.eager import context

FIRST_USED = (  # and imported then, by most programs
    "prpc_engine.tensorflow.callables",
    "prpc_engine.tensorflow.plane",
    "prpc_engine.tensorflow.server",
    "tensorflow_estimator.python.estimator.api._v1.estimator",
)
for name in FIRST_USED:
    importlib.import_module(name)
for part in ("feature_column", "keras", "train"):
    dir(getattr(tf.compat.v1, part))
assert len(os.listdir("/proc/self/task")) == 1, "TensorFlow has started threads"
assert context._context is None, "TensorFlow's runtime has begun"
