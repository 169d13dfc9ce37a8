"""protocol="prpc" for the scripts of TensorFlow: a stock wheel, and no change but the protocol's
name.

    import prpc_engine.tensorflow as prpc_tf
    prpc_tf.install()

    server = tf.distribute.Server(cluster, job_name="ps", task_index=0, protocol="prpc")

Or `prpc run script.py ...`, for a script without these two lines. TensorFlow 2.15 is what it is
made and tested for.

    hooks  ->  plane  ->  sendrecv  ->  star  ->  server  ->  programs  ->  stages  ->  runtime
    star  ->  bits, stage_calls  ->  partition
    runtime  ->  rewrite  ->  partition  ->  postpone
    runtime  ->  session_graph  ->  nodes
    sendrecv, programs  ->  transfers  ->  partition  ->  place  ->  nodes
    errors, tensors, proto, traffic
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

# what install() takes: the hooks are in parts that another version may have changed
TENSORFLOW_VERSION = "2.15"


def install(protocol: str = "grpc") -> None:
    """Let TensorFlow's servers and sessions know protocol="prpc"; again: does nothing. Before or
    after `import tensorflow`.

    `protocol` is that of servers whose script names none; `prpc run` says "prpc".

    Before is better: only then `config.tensor_fuse = True` works on a ConfigProto. Raises
    ImportError without TensorFlow, or with another version of it.
    """
    if "tensorflow" not in sys.modules:
        if importlib.util.find_spec("tensorflow") is None:
            raise ImportError("TensorFlow is not installed: pip install 'prpc-engine[tensorflow]'")
        # it imports protobuf, of TensorFlow
        with importlib.import_module("prpc_engine.tensorflow.proto").with_field():
            tensorflow = importlib.import_module("tensorflow")
    else:
        tensorflow = sys.modules["tensorflow"]
    if not tensorflow.__version__.startswith(f"{TENSORFLOW_VERSION}."):
        raise ImportError(
            f"TensorFlow {tensorflow.__version__} is installed, and prpc_engine.tensorflow is for "
            f"{TENSORFLOW_VERSION}"
        )
    _hooks().apply(protocol)


def uninstall() -> None:
    """Put back what install() changed; without it: does nothing.
    Close servers and sessions before.
    """
    if "prpc_engine.tensorflow.hooks" in sys.modules:
        _hooks().restore()


def statistics(session: Any) -> Any:
    """What the steps of a session on a server of ours took: StarStatistics or SendRecvStatistics.
    TypeError for any other.
    """
    plane = session.__dict__.get("_prpc")
    if plane is None:
        raise TypeError(f"{session!r} is no session of a server with protocol='prpc'")
    return plane.statistics()


def _hooks() -> Any:
    return importlib.import_module("prpc_engine.tensorflow.hooks")
