"""Scripts of TensorFlow as users write them, short: each builds a graph, runs some steps, and
returns what both protocols must agree on. Names are new in each call, as variables outlive
sessions.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_eager_execution()
v1.logging.set_verbosity("ERROR")
_numbers = itertools.count()


def task_server(server: Any) -> Any:
    """What of ours serves at a server's target."""
    from prpc_engine.tensorflow.server import server_of  # a process of stock servers has none

    found = server_of(server.target)
    assert found is not None, f"nothing of ours serves at {server.target}"
    return found


def serves(task: Task) -> bool:
    """Whether it does: its server was made before this."""
    return bool(task.server.target)


class Task:
    """This process's place in a cluster, with its server."""

    def __init__(self, protocol: str, cluster: dict[str, list[str]], job: str, index: int) -> None:
        self.protocol, self.job, self.index = protocol, job, index
        self.cluster = tf.train.ClusterSpec(cluster)
        self.server = v1.train.Server(
            self.cluster, job_name=job, task_index=index, protocol=protocol
        )
        self.fuse = False  # of the sessions
        self.scope = ""

    def setter(self) -> Any:
        """Variables on the ps, the rest here."""
        return v1.device(
            v1.train.replica_device_setter(
                cluster=self.cluster, worker_device=f"/job:{self.job}/task:{self.index}"
            )
        )

    def graph(self, name: str = "") -> Any:
        """A new default graph, whose variables have a scope that no other has; with `name`, that
        one.
        """
        scope = name or f"s{next(_numbers)}{self.job}{self.index}"
        return _scoped(scope)

    def session(self, **config: Any) -> Any:
        """A plain one."""
        return v1.Session(
            self.server.target, config=v1.ConfigProto(tensor_fuse=self.fuse, **config)
        )


class Client(Task):
    """A process that is no task, with worker 0 for its master."""

    def __init__(self, protocol: str, cluster: dict[str, list[str]]) -> None:
        self.protocol, self.job, self.index = protocol, "worker", 0
        self.cluster = tf.train.ClusterSpec(cluster)
        self.server = SimpleNamespace(target=f"{protocol}://{cluster['worker'][0]}")
        self.fuse, self.scope = False, ""

    def graph(self, name: str = "") -> Any:
        """With names that no task's own sessions have."""
        return super().graph(name or f"client{os.getpid()}n{next(_numbers)}")


class _scoped:  # noqa: N801
    def __init__(self, scope: str) -> None:
        self._graph = tf.Graph()
        self._scope = scope

    def __enter__(self) -> Any:
        self._default = self._graph.as_default()
        self._default.__enter__()
        v1.set_random_seed(11)
        self._variables = v1.variable_scope(self._scope)
        self._variables.__enter__()
        self._container = self._graph.container(self._scope)
        self._container.__enter__()
        return self._graph

    def __exit__(self, *raised: Any) -> None:
        self._container.__exit__(*raised)
        self._variables.__exit__(*raised)
        self._default.__exit__(*raised)


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    return value.decode() if isinstance(value, bytes) else value


def error_of(function: Callable[[], Any]) -> list[str]:
    """Type and first line of what it raises."""
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error).partition("\n")[0]]
    return ["", ""]


def said(function: Callable[[], Any]) -> list[str]:
    """Type and all the text of what it raises."""
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
}


def train(task: Task, optimizer: str, sparse: bool, resource: bool, steps: int = 6) -> Any:
    """Losses of a small model with two variables."""
    rng = np.random.RandomState(0)
    with task.graph(), task.setter():
        labels = v1.placeholder(tf.int64, [None])
        if sparse:
            ids = v1.placeholder(tf.int64, [None, 2])
            table = v1.get_variable(
                "table",
                [50, 4],
                initializer=v1.glorot_uniform_initializer(seed=3),
                use_resource=resource,
            )
            features = tf.reshape(tf.nn.embedding_lookup(table, ids), [-1, 8])
            data = [rng.randint(0, 50, (8, 2)) for _ in range(steps)]
        else:
            ids = v1.placeholder(tf.float32, [None, 8])
            features = ids
            data = [rng.rand(8, 8) for _ in range(steps)]
        weights = v1.get_variable(
            "w", [8, 3], initializer=v1.glorot_uniform_initializer(seed=4), use_resource=resource
        )
        loss = v1.losses.sparse_softmax_cross_entropy(labels, tf.matmul(features, weights))
        step = v1.train.get_or_create_global_step()
        op = OPTIMIZERS[optimizer]().minimize(loss, global_step=step)
        losses = []
        with v1.train.MonitoredTrainingSession(task.server.target) as session:
            for one in data:
                losses.append(session.run([op, loss], {ids: one, labels: rng.randint(0, 3, 8)})[1])
        return losses


def _control_flow(version: int) -> None:
    """Of what is built from here on: 1 is Switch and Merge, 2 is If and While."""
    v1.enable_control_flow_v2() if version == 2 else v1.disable_control_flow_v2()


def conditional(task: Task, version: int, resource: bool) -> Any:
    """Both branches of a cond read and change a variable of a ps."""
    _control_flow(version)
    with task.graph(), task.setter():
        v = v1.get_variable("v", [3], initializer=v1.ones_initializer(), use_resource=resource)
        choice = v1.placeholder(tf.bool, [])

        def double() -> Any:
            with tf.control_dependencies([v1.assign(v, v * 2.0)]):
                return v.read_value() + 0.5

        def drop() -> Any:
            with tf.control_dependencies([v1.assign_sub(v, tf.ones([3]))]):
                return v.read_value() - 0.5

        out = v1.cond(choice, double, drop)
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            values = [session.run(out, {choice: one}) for one in (True, True, False, True)]
            return [values, session.run(v)]


def initial_values(task: Task, resource: bool) -> Any:
    """global_variables_initializer() copies conditionals without their context: row 2 of what
    broke.
    """
    _control_flow(1)
    with task.graph(), task.setter():
        made = []
        for index in range(4):
            flag = v1.placeholder_with_default(index % 2 == 0, [])
            value = v1.cond(
                flag, lambda index=index: tf.fill([3], float(index)), lambda: -tf.ones([3])
            )
            made.append(v1.Variable(value, name=f"b{index}", use_resource=resource))
        results = []
        for _ in range(3):
            with task.session() as session:
                session.run(v1.global_variables_initializer())
                results.append(session.run(made))
        return results


def loop(task: Task, version: int, resource: bool, gradient: bool) -> Any:
    """A while_loop of the worker that reads a variable of a ps in every turn."""
    _control_flow(version)
    with task.graph(), task.setter():
        v = v1.get_variable(
            "v", [2], initializer=v1.constant_initializer(1.5), use_resource=resource
        )
        turns = v1.placeholder(tf.int32, [])
        _, total = v1.while_loop(
            lambda i, _: i < turns, lambda i, x: (i + 1, x * v), [0, tf.ones([2])]
        )
        wanted = [total] + (v1.gradients(total, [v]) if gradient else [])
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            return [session.run(wanted, {turns: one}) for one in (0, 1, 4)]


def recurrent(task: Task, version: int) -> Any:
    """dynamic_rnn: TensorArrays, stacks, nested contexts."""
    _control_flow(version)
    rng = np.random.RandomState(1)
    with task.graph(), task.setter():
        x = v1.placeholder(tf.float32, [None, 5, 3])
        cell = v1.nn.rnn_cell.BasicRNNCell(4)
        outputs, _ = v1.nn.dynamic_rnn(cell, x, dtype=tf.float32)
        loss = tf.reduce_mean(tf.square(outputs))
        op = v1.train.AdamOptimizer(0.01).minimize(loss)
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            for variable in v1.trainable_variables():
                variable.load(np.full(variable.shape.as_list(), 0.1), session)
            return [session.run([op, loss], {x: rng.rand(2, 5, 3)})[1] for _ in range(4)]


def partitioned(task: Task, resource: bool) -> Any:
    """A variable cut over the ps, and embedding_lookup_sparse, with Adam."""
    with task.graph(), task.setter():
        table = v1.get_variable(
            "t",
            [10, 3],
            initializer=v1.ones_initializer(),
            use_resource=resource,
            partitioner=v1.fixed_size_partitioner(2),
        )
        ids = v1.sparse_placeholder(tf.int64)
        found = tf.nn.embedding_lookup_sparse(table, ids, None, combiner="sum")
        loss = tf.reduce_sum(found * found)
        op = v1.train.AdamOptimizer(0.1).minimize(loss)
        fed = v1.SparseTensorValue([[0, 0], [0, 1], [1, 0]], [1, 7, 9], [2, 2])
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            return [session.run([op, loss], {ids: fed})[1] for _ in range(4)] + [
                session.run(tf.convert_to_tensor(table))
            ]


def lookup(task: Task) -> Any:
    """A table on a ps: strings there and back."""
    with task.graph(), task.setter():
        with v1.device("/job:ps/task:0"):
            table = tf.lookup.StaticHashTable(
                tf.lookup.KeyValueTensorInitializer(["a", "bc"], tf.constant([1, 2], tf.int64)), -1
            )
            back = tf.lookup.StaticHashTable(
                tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2], tf.int64), ["one", "two"]),
                "none",
            )
        words = v1.placeholder(tf.string, [None])
        found = table.lookup(words)
        text = back.lookup(found)
        with task.session() as session:
            session.run(v1.tables_initializer())
            return [
                session.run([found, text], {words: one})
                for one in (["a", "bc", "d"], [], ["bc\0x"])
            ]


def values(task: Task) -> Any:
    """Tensors of every kind go to a ps and come back."""
    found = []
    with task.graph():
        fed = {}
        for name, value in {
            "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
            "float64": np.float64(2.5),
            "bool": np.array([True, False]),
            "int8": np.int8(-3),
            "uint16": np.array([65535], np.uint16),
            "complex64": np.array([1 + 2j], np.complex64),
            "half": np.array([0.5], np.float16),
            "bfloat": np.array([1.5, -2.0], tf.bfloat16.as_numpy_dtype),
            "scalar_bfloat": tf.bfloat16.as_numpy_dtype(1.5),
            "empty": np.zeros((0, 3), np.float32),
            "strings": np.array([[b"x", b""], [b"\xc3\xa9\0", b"z"]], object),
            "large": np.arange(300000, dtype=np.float32),
        }.items():
            fed[
                v1.placeholder(
                    tf.as_dtype(value.dtype) if value.dtype != object else tf.string,
                    value.shape,
                    name,
                )
            ] = value
        quantized = tf.quantization.quantize(
            tf.constant([0.0, 1.0, 0.5]), 0.0, 1.0, tf.quint8
        ).output
        with v1.device("/job:ps/task:0"):
            there = [tf.identity(one) for one in fed] + [tf.identity(quantized)]
        back = [tf.identity(one) for one in there]
        size = tf.shape(there[0])
        with task.session() as session:
            for one in session.run([*back[:-1], tf.bitcast(back[-1], tf.uint8), size], fed):
                last = one.ravel()[-5:]
                found.append(
                    [
                        str(one.dtype),
                        one.shape,
                        str(last.astype(np.float32) if one.dtype == tf.bfloat16 else last),
                    ]
                )
    return found


def queue(task: Task) -> Any:
    """A queue on a ps, a queue runner here, and the end of it."""
    with task.graph(), task.setter():
        with v1.device("/job:ps/task:0"):
            line = v1.FIFOQueue(
                3, [tf.float32], [[]], shared_name=v1.get_variable_scope().name + "_line"
            )
        runner = v1.train.QueueRunner(line, [line.enqueue([2.0])])
        item = line.dequeue()
        taken = line.dequeue_many(2)
        close = line.close(cancel_pending_enqueues=True)
        with task.session() as session:
            coordinator = tf.train.Coordinator()
            threads = runner.create_threads(session, coordinator, start=True)
            values = [session.run(item) for _ in range(5)] + [session.run(taken)]
            coordinator.request_stop()
            session.run(close)
            coordinator.join(threads, stop_grace_period_secs=20)
            rest = error_of(lambda: [session.run(item) for _ in range(10)])
            return [values, rest[0]]


def dataset(task: Task) -> Any:
    """A one-shot and an initializable iterator feed a model whose variable is on a ps, until they
    end.
    """
    with task.graph(), task.setter():
        v = v1.get_variable("v", [], initializer=v1.zeros_initializer())
        with v1.device(f"/job:worker/task:{task.index}"):
            one = v1.data.make_one_shot_iterator(
                tf.data.Dataset.range(4).map(lambda x: tf.cast(x, tf.float32))
            ).get_next()
            count = v1.placeholder(tf.int64, [])
            iterator = v1.data.make_initializable_iterator(tf.data.Dataset.range(count).batch(2))
        op = v1.assign_add(v, one)
        batch = iterator.get_next()
        sums = []
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            ends = error_of(lambda: [sums.append(session.run(op)) for _ in range(9)])
            session.run(iterator.initializer, {count: 3})
            batches = [session.run(batch), session.run(batch)]
            return [sums, ends[0], batches, error_of(lambda: session.run(batch))[0]]


def layers(task: Task) -> Any:
    """Batch normalisation, dropout by a fixed seed, Keras layers, a tf.function, clipping, decay,
    an average.
    """
    rng = np.random.RandomState(2)
    with task.graph(), task.setter():
        x = v1.placeholder(tf.float32, [8, 6])
        hidden = tf.keras.layers.Dense(
            5, "relu", kernel_initializer=tf.keras.initializers.GlorotUniform(seed=1)
        )(x)
        hidden = v1.layers.batch_normalization(hidden, training=True)
        hidden = v1.nn.dropout(hidden, rate=0.3, seed=5)

        @tf.function
        def square(y: Any) -> Any:
            return tf.square(y) if tf.reduce_sum(y) > 0 else -y

        out = v1.layers.dense(
            square(hidden), 1, kernel_initializer=v1.glorot_uniform_initializer(seed=2)
        )
        loss = tf.reduce_mean(tf.square(out - 1.0))
        step = v1.train.get_or_create_global_step()
        rate = v1.train.exponential_decay(0.1, step, 2, 0.5)
        optimizer = v1.train.AdamOptimizer(rate)
        gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
        clipped, norm = tf.clip_by_global_norm(gradients, 1.0)
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            op = optimizer.apply_gradients(zip(clipped, variables, strict=True), global_step=step)
        average = tf.train.ExponentialMovingAverage(0.9)
        with tf.control_dependencies([op]):
            op = average.apply(list(variables))
        with v1.train.MonitoredTrainingSession(task.server.target) as session:
            found = [session.run([op, loss, norm], {x: rng.rand(8, 6)})[1:] for _ in range(5)]
            return [found, session.run(average.average(variables[0]))]


def sync_replicas(task: Task, name: str, replicas: int, steps: int, resource: bool) -> Any:
    """SyncReplicasOptimizer; every worker runs this at the same time. The step that each one saw
    last.
    """
    is_chief = task.index == 0
    with task.graph(name), task.setter():
        _, _, step_after, hook = _in_step(task, replicas, resource)
        missing = v1.report_uninitialized_variables(v1.global_variables())
        with task.session() as session:
            while not is_chief and len(session.run(missing)):  # the other session looks every 30 s
                pass
        seen = 0
        with v1.train.MonitoredTrainingSession(
            task.server.target, is_chief=is_chief, hooks=[hook], stop_grace_period_secs=1
        ) as session:
            while seen < steps:
                seen = session.run(step_after)
        return bool(seen >= steps)


def _in_step(task: Task, replicas: int, resource: bool) -> Any:
    """The variable, the step, the step as it is after one more turn, and a hook. Who reads the step
    within the turn, and does not see its end, takes both tokens of the last step when it is the
    faster one: the other then waits for ever."""
    v = v1.get_variable("v", [2], initializer=v1.ones_initializer(), use_resource=resource)
    step = v1.train.get_or_create_global_step()
    optimizer = v1.train.SyncReplicasOptimizer(
        v1.train.GradientDescentOptimizer(0.1), replicas, replicas
    )
    op = optimizer.minimize(tf.reduce_sum(tf.square(v)), global_step=step)
    with v1.device(step.device), tf.control_dependencies([op]):
        step_after = step.read_value()
    return v, step, step_after, optimizer.make_session_run_hook(task.index == 0, num_tokens=0)


def after_sync_replicas(task: Task, name: str, replicas: int, resource: bool) -> Any:
    """What they came to: the variable is 0.8 to the power of the steps, as each step takes the mean
    of all workers' gradients.
    """
    with task.graph(name), task.setter():
        v, step, _, _ = _in_step(task, replicas, resource)
        with task.session() as session:
            value, steps = session.run([v, step])
            return [value / 0.8**steps, bool(steps >= 4)]


def checkpoint(task: Task) -> Any:
    """A sharded Saver: each ps writes its own variables, and reads them back."""
    with task.graph(), task.setter(), tempfile.TemporaryDirectory() as folder:
        a = v1.get_variable("a", [3], initializer=v1.ones_initializer())
        b = v1.get_variable("b", [3], initializer=v1.zeros_initializer(), use_resource=False)
        saver = v1.train.Saver([a, b], sharded=True)
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            session.run([v1.assign(a, [1.0, 2.0, 3.0]), v1.assign(b, [4.0, 5.0, 6.0])])
            path = saver.save(session, os.path.join(folder, "model"))
            session.run(v1.global_variables_initializer())
            cleared = session.run([a, b])
            saver.restore(session, path)
            shards = len([one for one in os.listdir(folder) if ".data-" in one])
            return [cleared, session.run([a, b]), shards]


def feeding(task: Task) -> Any:
    """What is in the middle of a graph is fed; variables are loaded; state outlives the session;
    callables.
    """
    with task.graph(), task.setter():
        v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
        r = v1.get_variable("r", [2], initializer=v1.ones_initializer(), use_resource=False)
        x = v1.placeholder(tf.float32, [2], "x")
        middle = x + v
        out = middle * r
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            v.load([5.0, 6.0], session)
            r.load([2.0, 3.0], session)
            found = [
                session.run(out, {middle: [1.0, 1.0]}),
                session.run({"o": [out, (v, r)]}, {x: [0.0, 1.0]})["o"][0],
            ]
            fed = session.make_callable(out, [x])
            found += [fed([1.0, 1.0]), error_of(fed)[0], fed([1.0, 1.0], "one too many")]
            found.append(error_of(lambda: session.make_callable(r)(1.0))[0])
            found.append(session.run(out, {x: [1.0, 1.0], v.value(): [0.0, 0.0]}))
            found.append(session.run([], {}))
            with v1.device(r.device):
                constant = tf.constant(1.0)
            # of each, nothing is left to run
            found += [session.run(one) for one in (constant.op, r.op, v.handle.op)]
        with task.session() as session:
            found.append(session.run([v, r]))
        return found


def failures(task: Task) -> Any:
    """Errors have the class that the stock protocol gives them, and name the op."""
    with task.graph(), task.setter():
        v = v1.get_variable("v", [2])
        r = v1.get_variable("r", [2], use_resource=False)
        with v1.device("/job:ps/task:0"):
            checked = v1.check_ops.assert_equal if hasattr(v1, "check_ops") else v1.assert_equal
            with tf.control_dependencies(
                [
                    checked(
                        v1.placeholder_with_default(1, []), 2, message="never equal", name="check"
                    )
                ]
            ):
                refused = tf.identity(tf.constant(1.0), name="refused")
            reshaped = tf.reshape(
                v1.placeholder_with_default([1.0, 2.0], [None]), [3], name="reshaped"
            )
        unfed = v1.placeholder(tf.float32, [], "unfed")
        with task.session() as session:
            found = [
                error_of(lambda one=one: session.run(one))
                for one in (v, r, refused, reshaped, unfed + 1.0)
            ]
        closed = error_of(lambda: session.run(reshaped))
        return [
            *(
                [one[0], name in one[1]]
                for one, name in zip(found, ["", "", "never equal", "", "unfed"], strict=True)
            ),
            closed[0],
        ]


def dead_fetch(task: Task) -> Any:
    """A fetch within the branch that was not taken."""
    with task.graph(), task.setter():
        v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
        choice = v1.placeholder(tf.bool, [])
        there = tf.raw_ops.Switch(data=v * 3.0, pred=choice).output_true
        with v1.device(v.device):
            doubled = there * 2.0
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            found = [session.run([doubled, there], {choice: True})]
            return found + [
                error_of(lambda one=one: session.run(one, {choice: False}))[0] != ""
                for one in (there, doubled)
            ]


def global_step_read(task: Task) -> Any:
    """An op of a ps that comes after an update reads the variable after it: row 3 of what broke."""
    with task.graph(), task.setter():
        step = v1.train.get_or_create_global_step()
        with v1.device(step.device):
            line = v1.FIFOQueue(
                10, [tf.int64], [[]], shared_name=v1.get_variable_scope().name + "_tokens"
            )
            update = v1.assign_add(step, 1)
            with tf.control_dependencies([update]):
                put = line.enqueue(
                    [step.read_value() if hasattr(step, "handle") else step._snapshot]
                )
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(put)
            return session.run(line.dequeue_many(3))


def misplaced(task: Task) -> Any:
    """An op at a task that is not there, and one on a device that is not there."""
    found = []
    for name in ("/job:ps/task:7", "/job:nobody/task:0", "/job:ps/task:0/device:GPU:0"):
        with task.graph():
            with v1.device(name):
                x = tf.constant(1.0) + v1.placeholder_with_default(1.0, [])
            with task.session() as session:
                found.append(error_of(lambda session=session, x=x: session.run(x))[0])
    return found


def within(task: Task, timeout_ms: int) -> Any:
    """One value of a ps, by a session that waits so long."""
    with task.graph(), task.session(operation_timeout_in_ms=timeout_ms) as session:
        with v1.device("/job:ps/task:0"):
            x = tf.constant(1.0) + v1.placeholder_with_default(1.0, [])
        return session.run(x)


def take(task: Task, name: str) -> Any:
    """Take one item of a queue of a ps, however long that takes."""
    return _with_line(task, name, lambda line: line.dequeue())


def put(task: Task, name: str, value: int) -> Any:
    """Put one there."""
    return _with_line(task, name, lambda line: line.enqueue([value]))


def size(task: Task, name: str) -> Any:
    """How many there are."""
    return _with_line(task, name, lambda line: line.size())


def _with_line(task: Task, name: str, make: Callable[[Any], Any]) -> Any:
    with task.graph(name), v1.device("/job:ps/task:0"):
        wanted = make(v1.FIFOQueue(10, [tf.int32], [[]], shared_name=name))
        with task.session() as session:
            return session.run(wanted)


def running(task: Task) -> Any:
    """What sessions of other tasks run here now."""
    return task_server(task.server).stages.statistics().running
