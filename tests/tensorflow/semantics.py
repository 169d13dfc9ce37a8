"""What scripts of TensorFlow 1 are made of besides models: input, hooks, files, sessions; as
scenarios.py has its own.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import secrets
import tempfile
import threading
import weakref
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import function

from prpc_engine.tensorflow import statistics
from tests.tensorflow.scenarios import Task, error_of, task_server

v1 = tf.compat.v1


def embedding_columns(task: Task) -> Any:
    """Feature columns: hashed words, a shared embedding, buckets, crossed; a linear model and
    embeddings in one loss.
    """
    column = v1.feature_column
    rng = np.random.RandomState(4)
    with task.graph(), task.setter():
        words = column.categorical_column_with_hash_bucket("word", 20)
        ids = [column.categorical_column_with_identity(name, 10) for name in ("left", "right")]
        number = column.numeric_column("number")
        dense = [
            column.embedding_column(words, 3, initializer=v1.ones_initializer()),
            number,
            *column.shared_embedding_columns(ids, 2, initializer=v1.ones_initializer()),
            column.indicator_column(column.bucketized_column(number, [0.3, 0.6])),
        ]
        features = {
            "word": v1.placeholder(tf.string, [None, 1]),
            "number": v1.placeholder(tf.float32, [None, 1]),
            "left": v1.placeholder(tf.int64, [None, 1]),
            "right": v1.placeholder(tf.int64, [None, 1]),
        }
        deep = tf.reduce_sum(column.input_layer(features, dense), 1, keepdims=True)
        wide = column.linear_model(features, [words, column.crossed_column(["left", "right"], 50)])
        loss = tf.reduce_mean(tf.square(deep + wide - 1.0))
        op = v1.train.AdagradOptimizer(0.1).minimize(loss, v1.train.get_or_create_global_step())
        found = []
        with v1.train.MonitoredTrainingSession(task.server.target) as session:
            for _ in range(5):
                fed = {
                    features["word"]: [[f"w{one}"] for one in rng.randint(0, 9, 6)],
                    features["number"]: rng.rand(6, 1),
                    features["left"]: rng.randint(0, 10, (6, 1)),
                    features["right"]: rng.randint(0, 10, (6, 1)),
                }
                found.append(session.run([op, loss], fed)[1])
        return found


def convolutions(task: Task) -> Any:
    """tf.layers: convolution, pooling, batch normalisation with its updates, dropout that is
    off.
    """
    rng = np.random.RandomState(5)
    with task.graph(), task.setter():
        x = v1.placeholder(tf.float32, [4, 8, 8, 1])
        fixed = v1.glorot_uniform_initializer(seed=6)
        hidden = v1.layers.conv2d(x, 4, 3, activation=tf.nn.relu, kernel_initializer=fixed)
        hidden = v1.layers.batch_normalization(v1.layers.max_pooling2d(hidden, 2, 2), training=True)
        out = v1.layers.dense(
            v1.layers.flatten(v1.layers.dropout(hidden)), 2, kernel_initializer=fixed
        )
        loss = tf.reduce_mean(tf.square(out - 0.5))
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            op = v1.train.MomentumOptimizer(0.05, 0.9).minimize(
                loss, v1.train.get_or_create_global_step()
            )
        means = [one for one in v1.global_variables() if "moving_mean" in one.name]
        with v1.train.MonitoredTrainingSession(task.server.target) as session:
            losses = [session.run([op, loss], {x: rng.rand(4, 8, 8, 1)})[1] for _ in range(4)]
            return [losses, session.run(means)]


def dataset_until_its_end(task: Task) -> Any:
    """An iterator that the scaffold initializes; the end of the data ends the loop."""
    with task.graph(), task.setter():
        with v1.device(f"/job:{task.job}/task:{task.index}"):
            data = (
                tf.data.Dataset.from_tensor_slices(np.arange(10, dtype=np.float32))
                .map(lambda one: one * 2.0)
                .batch(3)
            )
            iterator = v1.data.make_initializable_iterator(data)
        total = v1.get_variable("total", [], initializer=v1.zeros_initializer())
        step = v1.train.get_or_create_global_step()
        with tf.control_dependencies([v1.assign_add(total, tf.reduce_sum(iterator.get_next()))]):
            op = v1.assign_add(step, 1)
        local = tf.group(
            v1.local_variables_initializer(), v1.tables_initializer(), iterator.initializer
        )
        turns = 0
        with v1.train.MonitoredTrainingSession(
            task.server.target, scaffold=v1.train.Scaffold(local_init_op=local)
        ) as session:
            while not session.should_stop():
                session.run(op)
                turns += 1
        with task.session() as session:
            return [turns, *session.run([total, step])]


def input_queues(task: Task) -> Any:
    """Producers and batches of TensorFlow's first releases: their queue runners start with the
    session, and end it.
    """
    with task.graph(), task.setter():
        total = v1.get_variable("total", [], initializer=v1.zeros_initializer())
        with v1.device(f"/job:{task.job}/task:{task.index}"):
            item = v1.train.slice_input_producer(
                [np.arange(7, dtype=np.float32)], num_epochs=2, shuffle=False
            )[0]
            batch = v1.train.batch([item], 2, allow_smaller_final_batch=True)
        step = v1.train.get_or_create_global_step()
        with tf.control_dependencies([v1.assign_add(total, tf.reduce_sum(batch))]):
            op = v1.assign_add(step, 1)
        sizes = []
        with v1.train.MonitoredTrainingSession(task.server.target) as session:
            while not session.should_stop():
                sizes.append(session.run([op, batch])[1].size)
        with task.session() as session:
            return [sizes, *session.run([total, step])]


def summaries_and_checkpoints(task: Task) -> Any:
    """A chief's folder: events with the values of each step, checkpoints, and a session that goes
    on from the last.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2):
            with task.graph(f"kept_{task.protocol}_{task.index}"), task.setter():
                v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
                step = v1.train.get_or_create_global_step()
                size, values = tf.reduce_sum(v), v * 1.0
                v1.summary.scalar("size", size)
                v1.summary.histogram("all", values)
                # after what is read of them: else either order is right
                with tf.control_dependencies([size, values, tf.identity(step)]):
                    op = tf.group(v1.assign(v, v * 2.0), v1.assign_add(step, 1))
                if turn:
                    with task.session() as session:  # what the ps remember is not what is asked for
                        session.run(v1.assign(v, [0.0, 0.0]))
                with v1.train.MonitoredTrainingSession(
                    task.server.target,
                    checkpoint_dir=folder,
                    save_checkpoint_steps=2,
                    save_summaries_steps=1,
                    hooks=[v1.train.StopAtStepHook(num_steps=3)],
                    log_step_count_steps=2,
                ) as session:
                    while not session.should_stop():
                        at = session.run([op, step])[1]
                with task.session() as session:
                    found.append([at, session.run(v)])
        events = sorted(name for name in os.listdir(folder) if name.startswith("events"))
        told = [
            [event.step, value.tag.rpartition("/")[2], value.simple_value, value.histo.num]
            for name in events
            for event in v1.train.summary_iterator(os.path.join(folder, name))
            for value in event.summary.value
            if "steps" not in value.tag and "global_step" not in value.tag
        ]
        return [found, sorted(one for one in told if one[1] == "size"), sorted(map(str, told))[-3:]]


def sharded_files(task: Task) -> Any:
    """A sharded Saver of variables over two ps: files that anybody reads, and of which the oldest
    go.
    """
    with task.graph(), task.setter(), tempfile.TemporaryDirectory() as folder:
        table = v1.get_variable(
            "t", [6, 2], initializer=v1.ones_initializer(), partitioner=v1.fixed_size_partitioner(2)
        )
        plain = v1.get_variable("p", [3], initializer=v1.zeros_initializer())
        saver = v1.train.Saver(sharded=True, max_to_keep=2)
        paths = []
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            for number in range(3):
                session.run(
                    [
                        v1.assign(plain, [number] * 3),
                        *(one.assign_add(tf.ones([3, 2])) for one in table),
                    ]
                )
                paths.append(saver.save(session, os.path.join(folder, "model"), global_step=number))
            saver.restore(session, paths[1])
            restored = session.run([plain, tf.convert_to_tensor(table)])
        reader = v1.train.load_checkpoint(paths[2])
        shapes = {
            name.partition("/")[2]: shape
            for name, shape in reader.get_variable_to_shape_map().items()
        }
        name = next(one for one in reader.get_variable_to_shape_map() if one.endswith("/t"))
        kept = [os.path.exists(f"{path}.index") for path in paths]
        return [
            restored,
            shapes,
            reader.get_tensor(name),
            kept,
            error_of(lambda: saver.restore(None, paths[0]))[0],
        ]


def hooks(task: Task) -> Any:
    """What a hook asks for it gets; one that finds a NaN, and one that fetches at the end."""

    class Listener(v1.train.SessionRunHook):  # type: ignore[misc]
        def __init__(self) -> None:
            self.heard: list[Any] = []

        def before_run(self, context: Any) -> Any:
            return v1.train.SessionRunArgs({"loss": loss}, {extra: 2.0})

        def after_run(self, context: Any, values: Any) -> None:
            self.heard.append(values.results["loss"])
            if len(self.heard) == 4:
                context.request_stop()

    with task.graph(), task.setter():
        extra = v1.placeholder_with_default(1.0, [])
        bad = v1.placeholder_with_default(0.0, [])
        v = v1.get_variable("v", [], initializer=v1.ones_initializer())
        step = v1.train.get_or_create_global_step()
        with tf.control_dependencies([v1.assign_add(v, extra)]):
            loss = tf.identity(v.read_value() + v1.log(1.0 - bad))
        op = v1.assign_add(step, 1)
        listener, final = Listener(), v1.train.FinalOpsHook(v)
        with v1.train.MonitoredTrainingSession(
            task.server.target, hooks=[listener, final]
        ) as session:
            while not session.should_stop():
                session.run(op)
        nan = v1.train.NanTensorHook(loss)
        with v1.train.SingularMonitoredSession([nan], master=task.server.target) as session:
            ends = error_of(lambda: session.run(op, {bad: 2.0}))[0]
        return [listener.heard, final.final_ops_values, ends]


def streaming_metrics(task: Task) -> Any:
    """Local variables stay at the worker, and a session's end does not lose them."""
    with task.graph(), task.setter():
        scores, labels = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.bool, [None])
        value, update = v1.metrics.auc(labels, scores)
        mean, update_mean = v1.metrics.mean(scores)
        with task.session() as session:
            session.run(v1.local_variables_initializer())
            for seed in range(3):
                rng = np.random.RandomState(seed)
                session.run(
                    [update, update_mean], {scores: rng.rand(50), labels: rng.rand(50) > 0.5}
                )
            return session.run([value, mean])


def python_ops(task: Task) -> Any:
    """A script's own Python within the graph, with what it raises; and TensorArrays behind map_fn
    and scan.
    """
    with task.graph(), task.setter():
        v = v1.get_variable("v", [3], initializer=v1.constant_initializer([1.0, 2.0, 3.0]))
        x = v1.placeholder(tf.float32, [])

        def check(one: Any) -> Any:
            if one < 0:
                raise ValueError(f"{one} is below 0")
            return np.float32(one * 2)

        with v1.device(f"/job:{task.job}/task:{task.index}"):
            doubled = v1.py_func(check, [x], tf.float32)
        out = tf.reduce_sum(v) * doubled
        mapped = tf.map_fn(lambda one: one * v[0], v)
        scanned = tf.scan(lambda total, one: total + one, v)
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            values = session.run([out, mapped, scanned], {x: 4.0})
            return [values, error_of(lambda: session.run(out, {x: -1.0}))[0]]


def random_numbers(task: Task) -> Any:
    """Kernels with seeds go on from step to step, and begin anew in each session."""
    with task.graph(), task.setter():
        with v1.device("/job:ps/task:0"):
            there = v1.random_uniform([2], seed=3)
        here = v1.random_normal([2], seed=4)
        found = []
        for _ in range(2):
            with task.session() as session:
                found.append([session.run([there, here]) for _ in range(3)])
        return found


def accumulators(task: Task) -> Any:
    """A conditional accumulator on a ps: gradients go in, a mean comes out;
    stale ones are dropped.
    """
    with task.graph(), task.setter():
        with v1.device("/job:ps/task:1"):
            name = v1.get_variable_scope().name + "_sum"
            into = v1.ConditionalAccumulator(tf.float32, [2], shared_name=name)
            sparse = v1.SparseConditionalAccumulator(
                tf.float32, [None, 2], shared_name=name + "_sparse"
            )
        fed, at = v1.placeholder(tf.float32, [2]), v1.placeholder(tf.int64, [])
        put, take, size = into.apply_grad(fed, at), into.take_grad(2), into.num_accumulated()
        slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([4, 1], tf.int64))
        put_sparse, take_sparse = (
            sparse.apply_indexed_slices_grad(slices, 0),
            sparse.take_indexed_slices_grad(1),
        )
        with task.session() as session:
            session.run(into.set_global_step(1))
            for value, step in (([1.0, 2.0], 1), ([9.0, 9.0], 0), ([3.0, 4.0], 2)):
                session.run(put, {fed: value, at: step})
            session.run(put_sparse)
            return [session.run(size), session.run(take), [*session.run(take_sparse)][:2]]


def close_ends_what_waits(task: Task) -> Any:
    """A dequeue of an empty queue ends with its session's close()."""
    with task.graph(), task.setter():
        name = v1.get_variable_scope().name
        with v1.device("/job:ps/task:0"):
            line = v1.FIFOQueue(3, [tf.float32], [[]], shared_name=f"{name}_line")
            begun = v1.FIFOQueue(3, [tf.float32], [[]], shared_name=f"{name}_begun")
        with tf.control_dependencies([begun.enqueue([1.5])]):
            item = line.dequeue()
        has_begun = begun.dequeue()
        ended: list[Any] = []
        closing = task.session()
        thread = threading.Thread(
            target=lambda: ended.append(error_of(lambda: closing.run(item))[0])
        )
        thread.start()
        with task.session() as session:
            seen = session.run(has_begun)
        closing.close()
        thread.join(30)
        return [seen, ended]


def run_options(task: Task) -> Any:
    """A step that is traced has the values that it would have had."""
    with task.graph(), task.setter():
        v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            options, metadata = (
                v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE),
                v1.RunMetadata(),
            )
            return session.run(v * 2.0, options=options, run_metadata=metadata)


def time_limits(task: Task) -> Any:
    """A step that waits ends when its options say so, and takes nothing; wherever it waits. The
    session goes on.
    """
    with task.graph(), task.setter():
        found: list[Any] = []
        for place in ("/job:ps/task:0", f"/job:{task.job}/task:{task.index}"):
            with v1.device(place):
                line = v1.FIFOQueue(
                    3,
                    [tf.float32],
                    [[]],
                    shared_name=f"{v1.get_variable_scope().name}_{place[5:7]}",
                )
                item, put = line.dequeue(), line.enqueue([2.5])
            with task.session() as session:
                session.run(put)
                session.run(item)  # what a first step takes is not to count against the limit
                limit = v1.RunOptions(timeout_in_ms=200)
                found.append(
                    error_of(lambda item=item, limit=limit: session.run(item, options=limit))[0]
                )
                session.run(put)
                long = v1.RunOptions(timeout_in_ms=60_000)
                found.extend([session.run(item, options=long), session.run(line.size())])
        return found


def limited_in_a_loop(task: Task) -> Any:
    """Steps that wait, some in vain, each with a limit: what they came to, and how much the graph
    grows after the first ones.
    """
    with task.graph():
        line = v1.FIFOQueue(3, [tf.float32], [[]])
        item, put = line.dequeue(), line.enqueue([2.5])
        found, sizes = [], []
        with task.session() as session:
            for _ in range(4):
                found.append(
                    error_of(lambda: session.run(item, options=v1.RunOptions(timeout_in_ms=50)))[0]
                )
                session.run(put)
                found.append(session.run(item, options=v1.RunOptions(timeout_in_ms=60_000)))
                sizes.append(
                    task_server(task.server).runtime.graph_size + statistics(session).nodes
                )
        return [found, sizes[-1] - sizes[0]]


def sessions_in_a_row(task: Task) -> Any:
    """Of sessions whose own parts keep nothing: what they come to, how much the graph of all
    sessions of the task grows by them, and whether they are garbage once they are closed.
    """
    with task.graph(), task.setter():
        x = v1.placeholder(tf.float32, [2])
        v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
        total = tf.reduce_sum(x * v)
        found, sizes, sessions = [], [], []
        for number in range(4):
            with task.session() as session:
                session.run(v1.global_variables_initializer())
                found.append(session.run(total, {x: [number, number]}))
                found.append(statistics(session).nodes > 0)
                sessions.append(weakref.ref(session))
            del session
            sizes.append(task_server(task.server).runtime.graph_size)
        gc.collect()
        return [found, sizes[-1] - sizes[0], [one() is None for one in sessions]]


def resets(task: Task) -> Any:
    """A container that is reset loses its variables, in all tasks; another one does not. Sessions
    at the target end.
    """
    with task.graph(), task.setter():
        scope = v1.get_variable_scope().name
        kept = v1.get_variable("kept", [], initializer=v1.ones_initializer())
        with v1.container(f"{scope}gone"):
            lost = [
                v1.get_variable(
                    f"v{n}", [2], initializer=v1.ones_initializer(), use_resource=bool(n)
                )
                for n in range(4)
            ]
            line = v1.FIFOQueue(3, [tf.float32], [[]])
        before = task.session()
        before.run([v1.global_variables_initializer(), line.enqueue([1.0])])
        v1.Session.reset(task.server.target, [f"{scope}gone"])
        found = [error_of(lambda: before.run(kept))[0]]
        with task.session() as session:
            found += [
                session.run(kept),
                [error_of(lambda v=v: session.run(v))[0] for v in lost],
                session.run(line.size()),
            ]
            session.run([v.initializer for v in lost])
            return [*found, session.run(lost)]


def _twin(factor: float) -> Any:
    @function.Defun(tf.float32, func_name="inner_twin")
    def inner(x: Any) -> Any:
        return x * factor

    @function.Defun(tf.float32, func_name="twin")
    def outer(x: Any) -> Any:
        return inner(x) + 1.0

    return outer


def twins(task: Task) -> Any:
    """Functions of one name whose bodies differ, in two sessions at once; they call others, of
    which the same is true.
    """
    found: list[Any] = []
    sessions = []
    for factor in (2.0, 3.0):
        with task.graph():
            with v1.device("/job:ps/task:0"):
                x = v1.placeholder(tf.float32, [])
                y = _twin(factor)(x)
            sessions.append((task.session(), x, y, tf.gradients(y, x)[0]))
            for session, fed, *values in sessions:
                found.append(session.run(values, {fed: 5.0}))
    for session, *_ in sessions:
        session.close()
    return found


def tables(task: Task) -> Any:
    """An index from a list, and a table that a step changes and the next one reads."""
    with task.graph(), task.setter():
        with v1.device("/job:ps/task:1"):
            index = tf.lookup.StaticVocabularyTable(
                tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([0, 1], tf.int64)), 2
            )
            counts = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
        words = v1.placeholder(tf.string, [None])
        found = index.lookup(words)
        add = counts.insert(words, counts.lookup(words) + 1)
        with task.session() as session:
            session.run(v1.tables_initializer())
            for one in (["a", "b"], ["a", "c"]):
                session.run(add, {words: one})
            return [
                session.run([found, counts.lookup(words)], {words: ["a", "b", "c", "d"]}),
                session.run(counts.size()),
            ]


def sliced_updates(task: Task) -> Any:
    """Rows of variables on a ps: repeated ids, scattered updates, lookups over several variables by
    both strategies.
    """
    with task.graph(), task.setter():
        rows = v1.get_variable("rows", [6, 2], initializer=v1.ones_initializer())
        parts = [
            v1.get_variable(f"part{n}", [3, 2], initializer=v1.constant_initializer(n))
            for n in range(2)
        ]
        ids = tf.constant([1, 4, 1])
        loss = tf.reduce_sum(tf.square(tf.gather(rows, ids)))
        op = v1.train.AdagradOptimizer(0.5).minimize(loss)
        found = [
            tf.nn.embedding_lookup(parts, [0, 5, 2]),
            v1.nn.embedding_lookup(parts, [0, 5, 2], partition_strategy="div"),
        ]
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            losses = [session.run([op, loss])[1] for _ in range(3)]
            session.run(v1.scatter_update(rows, [0, 5], [[7.0, 7.0], [8.0, 8.0]]))
            session.run(v1.scatter_add(rows, [0, 0], [[1.0, 0.0], [1.0, 0.0]]))
            return [losses, session.run(rows), session.run(found)]


def taken_and_put(task: Task) -> Any:
    """A step that takes from a queue of a ps what it puts there itself."""
    with task.graph():
        with v1.device("/job:ps/task:0"):
            line = v1.FIFOQueue(
                3, [tf.float32], [[]], shared_name=v1.get_variable_scope().name + "_line"
            )
            item = line.dequeue()
        value = v1.placeholder(tf.float32, [])
        put = line.enqueue(value)
        with task.session(operation_timeout_in_ms=20_000) as session:
            return [session.run(wanted, {value: 2.5}) for wanted in ([item, put], [put, item])]


def containers(task: Task) -> Any:
    """What has one name in two containers is two."""
    name = f"contained_{secrets.token_hex(4)}"
    with task.graph(name), task.setter():
        with v1.container("one"):
            v = v1.get_variable("v", [], initializer=v1.ones_initializer())
        with task.session() as session:
            session.run(v.initializer)
    with task.graph(name), task.setter():
        with v1.container("other"):
            v = v1.get_variable("v", [], initializer=v1.zeros_initializer())
        with task.session() as session:
            found = [
                error_of(lambda: session.run(v))[0],
                session.run(v1.report_uninitialized_variables()).size,
            ]
            session.run(v.initializer)
            found.append(session.run(v))
    with task.graph(name), task.setter():
        with v1.container("one"):
            v = v1.get_variable("v", [])
        with task.session() as session:
            return [*found, session.run(v)]


def devices(task: Task) -> Any:
    """What a session says it can run on."""
    with task.graph(), task.session() as session:
        return sorted(device.name for device in session.list_devices())


def device_filters(task: Task) -> Any:
    """A session that knows one ps and its own task: what it lists, runs, and is refused."""
    found = []
    for ps in (0, 1):
        with task.graph(), v1.device(f"/job:ps/task:{ps}"):
            value = tf.constant(2.0) * v1.placeholder_with_default(3.0, [])
            with task.session(device_filters=["/job:ps/task:0"]) as session:
                found.append(sorted(device.name for device in session.list_devices()))
                error = error_of(lambda: found.append(session.run(value)))  # noqa: B023
                found.append(error[0])
    return found


def device_placement(task: Task) -> Any:
    """Where log_device_placement says that nodes run, and how often it says so."""
    with task.graph("placed"), task.setter():
        v = v1.get_variable("v", [2], initializer=v1.ones_initializer(), use_resource=True)
        with v1.device(f"/job:{task.job}/task:{task.index}"):
            total = tf.reduce_sum(v.read_value() * v1.placeholder_with_default(1.0, []), name="sum")
        with tempfile.TemporaryFile("w+") as said, task.session(log_device_placement=True) as one:
            stderr = os.dup(2)
            os.dup2(said.fileno(), 2)
            try:
                one.run(v.initializer)
                for _ in range(2):
                    one.run(total)
            finally:
                os.dup2(stderr, 2)
                os.close(stderr)
            said.seek(0)
            found = re.findall(r"(placed\S*/(?:v|sum)): \((\w+)\): (\S+)", said.read())
        return sorted({(name.partition("/")[2], op, where) for name, op, where in found})


def run_configs(task: Task) -> Any:
    """What is said of a strategy that starts servers of its own; and of a protocol that nobody
    knows.
    """
    told: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler = Heard()
    logging.getLogger("prpc").addHandler(handler)
    strategy = v1.distribute.experimental.ParameterServerStrategy()
    config = tf.estimator.RunConfig(protocol=task.protocol, train_distribute=strategy)
    logging.getLogger("prpc").removeHandler(handler)
    return [told, config.protocol, error_of(lambda: tf.estimator.RunConfig(protocol="prcp"))]
