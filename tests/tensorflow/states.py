"""What lives in kernels and goes on from step to step, whatever a step fetches: random sequences,
tables made of keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from tests.tensorflow.scenarios import Task

v1 = tf.compat.v1


def random_kernels(task: Task, where: str) -> Any:
    """Each seeded random op, with inputs that a step computes, in changing sets of fetches; in two
    sessions.
    """
    with task.graph(), task.setter():
        x, ids = v1.placeholder(tf.float32, [None, 3]), v1.placeholder(tf.int64, [None, 1])
        weights, biases = (
            v1.get_variable("w", [20, 3], initializer=v1.ones_initializer()),
            tf.zeros([20]),
        )
        with v1.device("/job:ps/task:0") if where == "ps" else task.setter():
            rows = tf.shape(x)[0]
            loss = tf.nn.sampled_softmax_loss(weights, biases, ids, x, 4, 20, seed=6)
            kernels = [
                v1.nn.dropout(x, rate=0.5, seed=1),
                v1.random_shuffle(x, seed=2),
                v1.random_normal([rows], seed=3),
                v1.truncated_normal([rows, 2], seed=4),
                v1.random_uniform([rows], 0, 1000, tf.int32, seed=5),
                loss,
                v1.random_crop(x, [1, 2], seed=7),
                v1.multinomial(x, 2, seed=8),
                v1.random_gamma([rows], 0.5 + x[0, 0], seed=9),
                v1.random_uniform([2, 2], seed=10),
            ]
        init, found = v1.global_variables_initializer(), []
        for _ in range(2):
            with task.session() as session:
                session.run(init)
                for step, count in enumerate((3, 3, 5, 2)):
                    fed = {
                        x: np.arange(3.0 * count).reshape(count, 3),
                        ids: np.arange(count).reshape(count, 1),
                    }
                    found.append(session.run([*kernels[step:], *kernels[: step // 2]], fed))
        return found


def random_in_loop(task: Task) -> Any:
    """A seeded op in a loop and in a branch, with the loop's own shapes, under two sets of
    fetches.
    """
    with task.graph(), task.setter():
        turns = v1.placeholder(tf.int32, [])
        _, total = v1.while_loop(
            lambda i, _: i < turns,
            lambda i, total: (i + 1, total + tf.reduce_sum(v1.random_uniform([i + 1], seed=3))),
            [0, 0.0],
        )
        chosen = v1.cond(
            turns > 2, lambda: v1.random_uniform([turns], seed=4), lambda: tf.zeros([1])
        )
        with task.session() as session:
            fetches = ([total], [total, chosen], [chosen], [total, chosen])
            return [session.run(one, {turns: 2 + step % 2}) for step, one in enumerate(fetches)]


def dense_table(task: Task) -> Any:
    """A table of ps:1 that is made of an empty and a deleted key: filled, read, emptied and
    measured in steps of their own.
    """
    with task.graph(), task.setter():
        with v1.device("/job:ps/task:1"):
            table = tf.lookup.experimental.DenseHashTable(
                tf.int64, tf.float32, -1.0, empty_key=0, deleted_key=-1
            )
        with v1.device("/job:ps/task:1"):
            computed = tf.lookup.experimental.DenseHashTable(
                tf.int64,
                tf.float32,
                -1.0,
                empty_key=tf.constant(2, tf.int64) - 2,
                deleted_key=tf.negative(tf.constant(1, tf.int64)),
            )
        keys = v1.placeholder(tf.int64, [None])
        found = []
        with task.session() as session:
            for each in (table, computed):
                put, take = each.insert(keys, tf.cast(keys, tf.float32) * 2.0), each.erase(keys)
                look, size = each.lookup(keys), each.size()
                session.run(put, {keys: [3, 4, 5]})
                session.run([put, size], {keys: [6]})
                session.run(take, {keys: [4]})
                found += [session.run(look, {keys: [3, 4, 5, 6, 7]}), session.run(size)]
        with task.session() as session:  # a table outlives a session
            return [*found, session.run(table.lookup(keys), {keys: [3, 7]})]


def table_of_a_fed_key(task: Task) -> Any:
    """A table cannot be made anew in each step."""
    with task.graph(), task.setter():
        empty = v1.placeholder(tf.int64, [])
        with v1.device("/job:ps/task:1"):
            table = tf.lookup.experimental.DenseHashTable(
                tf.int64, tf.float32, -1.0, empty_key=empty, deleted_key=-1
            )
        with task.session() as session:
            try:
                session.run(table.size(), {empty: 0})
            except tf.errors.OpError as error:
                return [type(error).__name__, str(error)]
        return []


def keras_fit(task: Task) -> Any:
    """A model of Keras over a session of the server: compiled, fitted on arrays and on tensors,
    evaluated, saved, asked.
    """
    v1.disable_eager_execution()
    keras = v1.keras
    rng = np.random.RandomState(3)
    data, wanted = rng.rand(24, 4).astype(np.float32), rng.rand(24, 1).astype(np.float32)
    with task.graph() as graph, task.setter(), task.session(allow_soft_placement=True) as session:
        keras.backend.set_session(session)
        try:
            model = keras.Sequential(
                [
                    keras.layers.Dense(
                        5,
                        "relu",
                        kernel_initializer=keras.initializers.glorot_uniform(seed=1),
                        input_shape=(4,),
                    ),
                    keras.layers.Dropout(0.5, seed=2),
                    keras.layers.Dense(
                        1, kernel_initializer=keras.initializers.glorot_uniform(seed=3)
                    ),
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
            fitted = model.fit(
                data, wanted, batch_size=8, epochs=2, shuffle=False, verbose=0
            ).history["loss"]
            by_tensors = model.fit(
                tf.constant(data), tf.constant(wanted), steps_per_epoch=2, epochs=1, verbose=0
            ).history["loss"]
            found = [
                fitted,
                by_tensors,
                model.evaluate(data, wanted, verbose=0),
                model.predict(data[:2]),
            ]
            weights = model.get_weights()
            model.set_weights([0 * one for one in weights])
            return [
                *found,
                weights[0],
                model.predict(data[:1]),
                model.train_on_batch(data, wanted),
                graph is session.graph,
            ]
        finally:
            keras.backend.set_session(None)


def callables(task: Task) -> Any:
    """The ways to run a step besides run(): a callable of fetches, one of options with a connection
    and with metadata.
    """
    with task.graph(), task.setter():
        v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
        x, y = v1.placeholder(tf.float32, [2], name="x"), v1.placeholder(tf.float32, [2], name="y")
        total, add = v + x * y, v1.assign_add(v, [1.0, 1.0])
        options = config_pb2.CallableOptions()
        options.feed.append(x.name)
        ten = x * 10.0
        options.fetch.extend([total.name, ten.name])
        options.target.append(add.op.name)
        connection = options.tensor_connection.add()
        connection.from_tensor, connection.to_tensor = ten.name, y.name
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            by_fetches = session.make_callable(total, [x, y])
            by_options, metadata = session._make_callable_from_options(options), v1.RunMetadata()
            found = [by_fetches([1.0, 2.0], [3.0, 4.0])]
            found.append(by_options(np.array([1.0, 2.0], np.float32))[1])
            found.append(by_options(np.array([3.0, 4.0], np.float32), run_metadata=metadata)[1])
            return [*found, session.run(v)]
