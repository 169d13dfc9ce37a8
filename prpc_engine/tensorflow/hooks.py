"""What of TensorFlow is changed, and put back: each hook looks whether it is asked for something of
ours, and else calls what was there.

    hook                                 does
    Server.__init__, start, join,        protocol="prpc" or "grpc++": a TaskServer
      target, __del__
    BaseSession.__init__                 a target that is a server of ours, here or in another
                                         process (remote.py): TensorFlow's session on an empty
                                         target, as a shell
    BaseSession._do_run                  of such a session: runs on the server's plane; run() and
                                         all below lead here
    BaseSession.run                      of such a session, with run_metadata: it gets what all
                                         tasks of the step say (tracing.py)
    BaseSession.partial_run_setup        of such a session: begins a step that is run bit by bit;
                                         partial_run() leads to _do_run, too
    Session.reset                        of a target of ours: its containers, in all tasks
    BaseSession.make_callable, close,    the same
      _make_callable_from_options,
      list_devices
    RunConfig's check of its properties  lets our protocols through; and warns of what does not go
                                         over them
    connect_to_cluster, of eager         with a protocol of ours: UnimplementedError. Its remote
      clients and the strategies of        contexts are TensorFlow's C++ over gRPC, and nothing of
      version 2                            Python is asked there
    tf.compat.v1.ConfigProto             takes tensor_fuse (proto.py), when TensorFlow was imported
                                         before
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import tensorflow as tf
from tensorflow.python.client import session as tf_sessions
from tensorflow.python.eager import remote as remote_eager
from tensorflow.python.framework import errors_impl as tf_errors
from tensorflow.python.training import server_lib
from tensorflow.python.util import compat
from tensorflow_estimator.python.estimator import run_config

from prpc_engine import errors as engine_errors
from prpc_engine.tensorflow import errors, proto, remote
from prpc_engine.tensorflow.callables import OptionsCallable
from prpc_engine.tensorflow.place import cpu_of
from prpc_engine.tensorflow.plane import plane_for
from prpc_engine.tensorflow.remote import RemoteMaster
from prpc_engine.tensorflow.server import PROTOCOLS, TaskServer, server_of
from shard import ShardError

_Server, _Session = server_lib.Server, tf_sessions.BaseSession
# for good: another thread may be in a hook when it is taken out
_before: dict[tuple[Any, str], Any] = {}
logger = logging.getLogger("prpc")
_default: list[str] = []  # the protocol of servers whose script names none


def is_installed() -> bool:
    """Whether the hooks are there."""
    return _Server.__dict__["__init__"] is _server_init


def apply(protocol: str) -> None:
    """Put the hooks in; again: does nothing. `protocol`: of servers whose script names none."""
    if is_installed():
        return
    _default[:] = [protocol]
    hooks: list[tuple[Any, str, Any]] = [
        (_Server, "__init__", _server_init),
        (_Server, "__del__", _server_del),
        (_Server, "start", _server_start),
        (_Server, "join", _server_join),
        (_Server, "target", property(_server_target)),
        (_Session, "__init__", _session_init),
        (_Session, "_do_run", _session_do_run),
        (_Session, "run", _session_run),
        (_Session, "partial_run_setup", _session_partial_run_setup),
        (_Session, "make_callable", _session_make_callable),
        (_Session, "_make_callable_from_options", _session_make_callable_from_options),
        (_Session, "close", _session_close),
        (_Session, "list_devices", _session_list_devices),
        (tf_sessions.Session, "reset", staticmethod(_session_reset)),
        (run_config, "_validate_properties", _validate_run_config),
        (remote_eager, "connect_to_cluster", _connect_to_cluster),
        (tf.config, "experimental_connect_to_cluster", _connect_to_cluster),
    ]
    if proto.FIELD_NAME not in tf.compat.v1.ConfigProto.DESCRIPTOR.fields_by_name:
        hooks.append((tf.compat.v1, "ConfigProto", proto.config_class(tf.compat.v1.ConfigProto)))
    for owner, name, hook in hooks:
        _before[owner, name] = owner.__dict__[name]
        setattr(owner, name, hook)


def restore() -> None:
    """Take the hooks out. Servers and sessions that were made meanwhile are ours no longer: close
    them before.
    """
    for (owner, name), before in _before.items():
        setattr(owner, name, before)
    remote.close_all()


# -- servers ---------------------------------------------------------------------------------------


def _server_init(
    self: Any,
    server_or_cluster_def: Any,
    job_name: Any = None,
    task_index: Any = None,
    protocol: Any = None,
    config: Any = None,
    start: bool = True,
) -> None:
    # a ServerDef may name one
    if protocol is None and not getattr(server_or_cluster_def, "protocol", ""):
        protocol = _default[0]
    definition = server_lib._make_server_def(
        server_or_cluster_def, job_name, task_index, protocol, config
    )
    if definition.protocol not in PROTOCOLS:
        before = _before[_Server, "__init__"]
        try:
            before(self, server_or_cluster_def, job_name, task_index, protocol, config, start)
        except tf_errors.NotFoundError:
            allowed = ", ".join(map(repr, ("grpc", *PROTOCOLS)))
            text = (
                f"No server factory registered for protocol={definition.protocol!r}: "
                f"{allowed} are there"
            )
            raise tf_errors.NotFoundError(None, None, text) from None
        return
    self._server_def = definition
    # the latter says that it is one of ours, whatever becomes of it
    self._server = self._prpc = None
    try:
        self._prpc = TaskServer(definition)
        if start:
            self._prpc.start()
    except engine_errors.RpcError as error:
        raise errors.from_engine(error) from None


def _server_del(self: Any) -> None:
    if "_prpc" not in self.__dict__:
        _before[_Server, "__del__"](self)


def _server_start(self: Any) -> None:
    if "_prpc" in self.__dict__:
        self._prpc.start()
    else:
        _before[_Server, "start"](self)


def _server_join(self: Any) -> None:
    if "_prpc" in self.__dict__:
        self._prpc.join()
    else:
        _before[_Server, "join"](self)


def _server_target(self: Any) -> Any:
    return self._prpc.target if "_prpc" in self.__dict__ else _before[_Server, "target"].fget(self)


def _validate_run_config(config: Any) -> None:
    protocol, before = config.protocol, _before[run_config, "_validate_properties"]
    if protocol not in PROTOCOLS:
        before(config)
        return
    config._protocol = None  # not one that TensorFlow knows
    try:
        before(config)
    finally:
        config._protocol = protocol
    strategy = type(config.train_distribute).__name__
    if strategy.startswith("ParameterServerStrategy"):
        logger.warning(
            'RunConfig(protocol="%s", train_distribute=%s(...)): '
            "the strategy starts servers of its own, and goes on over gRPC; "
            "leave train_distribute out, and the variables go to the ps all the same",
            protocol,
            strategy,
        )


def _connect_to_cluster(*args: Any, **keywords: Any) -> Any:
    before = _before[remote_eager, "connect_to_cluster"]
    asked = inspect.signature(before).bind(*args, **keywords)
    asked.apply_defaults()
    cluster = asked.arguments["cluster_spec_or_resolver"]
    protocol = asked.arguments["protocol"] or getattr(cluster, "rpc_layer", None)
    if protocol in PROTOCOLS:
        raise tf_errors.UnimplementedError(
            None,
            None,
            f"an eager client asked for protocol={protocol!r}, as a ParameterServerStrategy of "
            "version 2 does: its remote contexts are gRPC, and cannot be replaced from Python. "
            'Use protocol="grpc" for it and its servers, or a session '
            "(MonitoredTrainingSession, an Estimator), which goes over prpc",
        )
    return before(*args, **keywords)


# -- sessions --------------------------------------------------------------------------------------


def _session_init(self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
    self._session = None  # for its __del__, when there is no way to the target
    server = _server_at(target, config)
    before = _before[_Session, "__init__"]
    if server is None:
        before(self, target, graph, config)
        return
    before(self, "", graph, config)
    self._target = server.target.encode()
    self._prpc = plane_for(server, self)


def _server_at(target: Any, config: Any = None) -> TaskServer | RemoteMaster | None:
    """Of ours, in this process or in another one."""
    server = server_of(target)
    if server is not None:
        return server
    timeout_ms = getattr(config, "operation_timeout_in_ms", 0)
    try:
        return remote.master_at(target, timeout_ms / 1000 if timeout_ms else None)
    except (engine_errors.RpcError, ShardError) as error:
        raise errors.from_engine(error) from None


def _session_do_run(
    self: Any, handle: Any, targets: Any, fetches: Any, feeds: Any, options: Any, metadata: Any
) -> Any:
    if "_prpc" not in self.__dict__:
        return _before[_Session, "_do_run"](
            self, handle, targets, fetches, feeds, options, metadata
        )
    if handle is None:
        return self._do_call(self._prpc.run, targets, fetches, feeds, options, metadata)
    if targets:
        raise RuntimeError(
            f"partial_run() runs what partial_run_setup() was given as soon as it can: it fetches "
            f"tensors, and got the operation {targets[0].name!r}"
        )
    return self._do_call(self._prpc.run_bit, handle, fetches, feeds)


def _session_run(
    self: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
) -> Any:
    before = _before[_Session, "run"]
    if run_metadata is None or "_prpc" not in self.__dict__:
        return before(self, fetches, feed_dict, options, run_metadata)
    with self._prpc.traced(options) as trace:
        value = before(self, fetches, feed_dict, options, run_metadata)
    trace.complete(run_metadata)
    return value


def _session_partial_run_setup(self: Any, fetches: Any, feeds: Any = None) -> Any:
    if "_prpc" not in self.__dict__:
        return _before[_Session, "partial_run_setup"](self, fetches, feeds)
    if self._closed:
        raise RuntimeError("partial_run_setup() of a session that is closed")
    fetched = tf_sessions._FetchHandler(self.graph, fetches, {})
    fed = [
        self.graph.as_graph_element(one, allow_operation=False)
        for one in tf.nest.flatten(list(feeds or ()), expand_composites=True)
    ]
    return self._prpc.set_up(fetched.targets(), fetched.fetches(), fed)


def _session_make_callable(
    self: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False
) -> Any:
    if "_prpc" not in self.__dict__ or feed_list is not None:
        # of one that is fed, TensorFlow's own leads to run()
        return _before[_Session, "make_callable"](self, fetches, feed_list, accept_options)

    def run(**options: Any) -> Any:
        return self.run(fetches, **options)

    return run


def _session_make_callable_from_options(self: Any, options: Any) -> Any:
    if "_prpc" not in self.__dict__:
        return _before[_Session, "_make_callable_from_options"](self, options)
    return OptionsCallable(self, options)


def _session_close(self: Any) -> None:
    if "_prpc" in self.__dict__:
        self._prpc.close()
    _before[_Session, "close"](self)


def _session_reset(target: Any, containers: Any = None, config: Any = None) -> None:
    server = _server_at(target, config)
    if server is None:
        _before[tf_sessions.Session, "reset"].__func__(target, containers, config)
        return
    try:
        server.reset([compat.as_text(one) for one in containers or ("",)])
    except (engine_errors.RpcError, ShardError) as error:
        raise errors.from_engine(error) from None


def _session_list_devices(self: Any) -> Any:
    if "_prpc" not in self.__dict__:
        return _before[_Session, "list_devices"](self)
    tasks = sorted(self._prpc.tasks)
    return [tf_sessions._DeviceAttributes(cpu_of(one), "CPU", 0, 0) for one in tasks]
