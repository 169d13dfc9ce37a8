"""Loops, branches and functions with variables on two ps, and lists that go from task to task; as
scenarios.py has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.tensorflow.scenarios import Task, _control_flow

v1 = tf.compat.v1


PS = ("/job:ps/task:0", "/job:ps/task:1")


def _pair(resource: bool = True, homes: Sequence[str] = PS) -> tuple[Any, Any]:
    """Two variables, each at a task of its own."""
    made = []
    for name, value, home in (("v", 1.5, homes[0]), ("w", 0.5, homes[1])):
        with v1.device(home):
            made.append(
                v1.get_variable(
                    name, [2], initializer=v1.constant_initializer(value), use_resource=resource
                )
            )
    return made[0], made[1]


def _values(task: Task, wanted: Any, fed: list[dict[Any, Any]]) -> Any:
    with task.session() as session:
        session.run(v1.global_variables_initializer())
        return [session.run(wanted, one) for one in fed]


def _losses(task: Task, loss: Any, fed: list[dict[Any, Any]]) -> Any:
    """Of a training whose variables all begin at small numbers."""
    op = v1.train.AdamOptimizer(0.05).minimize(loss)
    with task.session() as session:
        session.run(v1.global_variables_initializer())
        for variable in v1.trainable_variables():
            shape = variable.shape.as_list()
            variable.load(np.linspace(-0.3, 0.4, int(np.prod(shape))).reshape(shape), session)
        return [session.run([op, loss], one)[1] for one in fed]


def loop_over(
    task: Task, version: int, gradient: bool, resource: bool = True, both: bool = True
) -> Any:
    """A loop that reads variables of both ps, or of one, in every turn, and their gradients."""
    _control_flow(version)
    with task.graph(), task.setter():
        v, w = _pair(resource)
        turns = v1.placeholder(tf.int32, [])
        body = (
            (lambda i, x: (i + 1, tf.tanh(x * v + w)))
            if both
            else (lambda i, x: (i + 1, tf.tanh(x * v)))
        )
        _, total = v1.while_loop(lambda i, _: i < turns, body, [0, tf.ones([2])])
        gradients = v1.gradients(total, [v, w][: 1 + both]) if gradient else []
        return _values(task, [total, *gradients], [{turns: one} for one in (0, 1, 4)])


def loop_assigns(task: Task, version: int, resource: bool = True) -> Any:
    """A loop that changes a variable of one ps by what it reads from the other, and reads it
    again.
    """
    _control_flow(version)
    with task.graph(), task.setter():
        v, w = _pair(resource)
        turns = v1.placeholder(tf.int32, [])

        def body(i: Any, x: Any) -> Any:
            with tf.control_dependencies([v1.assign_add(v, tf.stop_gradient(x) * w)]):
                return i + 1, x + v.read_value()

        _, total = v1.while_loop(
            lambda i, _: i < turns, body, [0, tf.ones([2])], parallel_iterations=1
        )
        with tf.control_dependencies([total]):
            after = v.read_value()
        return _values(task, [total, after], [{turns: one} for one in (0, 1, 3)])


def condition(task: Task, version: int, resource: bool = True) -> Any:
    """The condition of a loop reads a variable of one ps, its body one of the other."""
    _control_flow(version)
    with task.graph(), task.setter():
        v, w = _pair(resource)
        x = v1.while_loop(
            lambda x: tf.reduce_sum(x) < tf.reduce_sum(v), lambda x: x + w, [tf.zeros([2])]
        )
        return _values(task, x, [{}])


def branches(task: Task, version: int, resource: bool = True) -> Any:
    """A cond with a variable of each ps, one of which a branch changes, and its gradients."""
    _control_flow(version)
    with task.graph(), task.setter():
        v, w = _pair(resource)
        choice = v1.placeholder(tf.bool, [])

        def change() -> Any:
            with tf.control_dependencies([v1.assign_add(w, v * 0.0 + 1.0)]):
                return v * w.read_value()

        out = v1.cond(choice, change, lambda: v - w)
        read = v1.cond(choice, lambda: v * v * w, lambda: v - w)
        gradients = v1.gradients(read, [v, w])
        with tf.control_dependencies([out]):
            after = w.read_value()
        found = _values(task, [out, after], [{choice: one} for one in (True, False, True)])
        return found + _values(task, [read, *gradients], [{choice: one} for one in (True, False)])


def effects(task: Task, version: int) -> Any:
    """Branches and loops with changes of variables that no value waits for: without a control
    dependency they are not made.
    """
    _control_flow(version)
    with task.graph(), task.setter():
        v, w = _pair()
        choice = v1.placeholder(tf.bool, [])

        def change(number: float) -> Any:
            v1.assign_add(v, w * number)
            return tf.constant(number)

        def body(i: Any) -> Any:
            v1.assign_add(w, [1.0, 1.0])
            return i + 1 + tf.cast(v[0] * 0.0, tf.int32)

        out = v1.cond(choice, lambda: change(1.0), lambda: change(2.0))
        count = v1.while_loop(lambda i: i < 3, body, [0])
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            found = []
            for wanted in (out, out + 1.0, count, count + 1):
                found.append([session.run(wanted, {choice: one}) for one in (True, False)])
                found.append(session.run([v, w]))
            return found


def cases(task: Task, version: int) -> Any:
    """switch_case over variables of both ps."""
    _control_flow(version)
    with task.graph(), task.setter():
        v, w = _pair()
        index = v1.placeholder(tf.int32, [])
        out = tf.switch_case(index, [lambda: v * 2.0, lambda: w * 3.0, lambda: v + w])
        return _values(
            task, [out, *v1.gradients(out, [v, w])], [{index: one} for one in (0, 1, 2, 7)]
        )


def nested(task: Task, version: int, gradient: bool, resource: bool = True) -> Any:
    """A cond in a loop in a loop, over variables of both ps, and their gradients."""
    _control_flow(version)
    with task.graph(), task.setter():
        v, w = _pair(resource)
        turns = v1.placeholder(tf.int32, [])

        def inner(j: Any, x: Any) -> Any:
            return j + 1, v1.cond(tf.equal(j % 2, 0), lambda: x * v, lambda: x - w)

        def outer(i: Any, x: Any) -> Any:
            return i + 1, tf.tanh(v1.while_loop(lambda j, _: j < 3, inner, [0, x])[1] + w)

        _, total = v1.while_loop(lambda i, _: i < turns, outer, [0, tf.ones([2])])
        gradients = v1.gradients(total, [v, w]) if gradient else []
        return _values(task, [total, *gradients], [{turns: one} for one in (0, 1, 3)])


def higher_order(task: Task, version: int, kind: str) -> Any:
    """map_fn, scan and foldl whose function reads variables of both ps, and their gradients."""
    _control_flow(version)
    functions: dict[str, Callable[[Any, Any, Any], Any]] = {
        "map_fn": lambda x, v, w: tf.map_fn(lambda one: tf.tanh(one * v + w), x),
        "scan": lambda x, v, w: tf.scan(lambda before, one: tf.tanh(before * v + one * w), x),
        "foldl": lambda x, v, w: tf.foldl(lambda before, one: tf.tanh(before * v + one * w), x),
    }
    with task.graph(), task.setter():
        v, w = _pair()
        x = v1.placeholder(tf.float32, [None, 2])
        out = functions[kind](x, v, w)
        data = np.random.RandomState(3).rand(4, 2)
        return _values(task, [out, *v1.gradients(out, [v, w])], [{x: data}, {x: data[:1]}])


def network(task: Task, version: int, kind: str) -> Any:
    """A recurrent network in training: its kernels and biases are on both ps."""
    _control_flow(version)
    rng = np.random.RandomState(1)
    with task.graph(), task.setter():
        x, lengths = v1.placeholder(tf.float32, [None, 5, 3]), v1.placeholder(tf.int32, [None])
        if kind == "dynamic_rnn":
            outputs, _ = v1.nn.dynamic_rnn(v1.nn.rnn_cell.LSTMCell(4), x, lengths, dtype=tf.float32)
        elif kind == "bidirectional":
            cells = [v1.nn.rnn_cell.GRUCell(4, name=one) for one in ("forth", "back")]
            outputs = tf.concat(
                v1.nn.bidirectional_dynamic_rnn(*cells, x, lengths, dtype=tf.float32)[0], 2
            )
        else:
            layers = {
                "lstm1": v1.keras.layers.LSTM,
                "lstm": tf.keras.layers.LSTM,
                "gru": tf.keras.layers.GRU,
                "simple": tf.keras.layers.SimpleRNN,
            }
            outputs = layers[kind](4, return_sequences=True)(x)
        loss = tf.reduce_mean(tf.square(outputs - 0.5))
        fed = [{x: rng.rand(2, 5, 3), lengths: [5, 3]} for _ in range(4)]
        return _losses(task, loss, fed)


def decoder(task: Task, version: int) -> Any:
    """A loop looks rows up in a table of one ps, and trains it."""
    _control_flow(version)
    with task.graph(), task.setter():
        _, w = _pair()
        with v1.device(PS[0]):
            table = v1.get_variable("table", [6, 2])
        turns = v1.placeholder(tf.int32, [])

        def body(i: Any, x: Any) -> Any:
            return i + 1, tf.tanh(x * tf.nn.embedding_lookup(table, i) + w)

        _, total = v1.while_loop(lambda i, _: i < turns, body, [0, tf.ones([2])])
        return _losses(
            task, tf.reduce_sum(tf.square(total - 0.3)), [{turns: one} for one in (1, 3, 5, 3)]
        )


def called(task: Task, homes: Sequence[str] = PS) -> Any:
    """A tf.function over two variables, called by the graph; a loop and a change are in it."""
    _control_flow(2)
    with task.graph(), task.setter():
        v, w = _pair(homes=homes)

        @tf.function
        def both(x: Any) -> Any:
            for _ in tf.range(2):
                x = tf.tanh(x * v + w)
            w.assign_add(x)
            return x + w

        x = v1.placeholder(tf.float32, [2])
        out = both(x)
        with tf.control_dependencies([out]):
            after = w.read_value()
        return _values(
            task, [out, after, *v1.gradients(out, [v, w])], [{x: [0.5, 1.0]}, {x: [0.1, 0.2]}]
        )


def lists(task: Task) -> Any:
    """Lists that one task makes and others read and add to."""
    with task.graph(), task.setter():
        x = v1.placeholder(tf.float32, [None, 2])
        with v1.device("/job:ps/task:0"):
            made = tf.raw_ops.TensorListFromTensor(tensor=x * 2.0, element_shape=tf.constant([2]))
        with v1.device("/job:ps/task:1"):
            longer = tf.raw_ops.TensorListPushBack(input_handle=made, tensor=tf.reduce_sum(x, 0))
        size = tf.raw_ops.TensorListLength(input_handle=longer)
        there = tf.raw_ops.TensorListStack(
            input_handle=longer, element_shape=tf.constant([2]), element_dtype=tf.float32
        )
        with v1.device("/job:ps/task:0"):
            last = tf.raw_ops.TensorListGetItem(
                input_handle=longer,
                index=size - 1,
                element_shape=tf.constant([2]),
                element_dtype=tf.float32,
            )
        words = tf.raw_ops.TensorListFromTensor(
            tensor=tf.constant(["a", "bc"]), element_shape=tf.constant([], tf.int32)
        )
        with v1.device("/job:ps/task:1"):
            back = tf.raw_ops.TensorListStack(
                input_handle=words, element_shape=tf.constant([], tf.int32), element_dtype=tf.string
            )
        return _values(
            task, [size, there, last, back], [{x: [[1.0, 2.0], [3.0, 4.0]]}, {x: np.zeros((0, 2))}]
        )


def list_in_loop(task: Task, version: int, resource: bool = True) -> Any:
    """A loop of the worker with a body at a ps, in which a TensorArray is written."""
    _control_flow(version)
    with task.graph(), task.setter():
        v, w = _pair(resource)
        turns = v1.placeholder(tf.int32, [])

        def body(i: Any, found: Any) -> Any:
            with v1.device("/job:ps/task:1"):
                value = w * tf.cast(i, tf.float32)
            return i + 1, found.write(i, value + v)

        _, found = v1.while_loop(
            lambda i, _: i < turns, body, [0, tf.TensorArray(tf.float32, turns, element_shape=[2])]
        )
        stacked = found.stack()
        return _values(
            task, [stacked, *v1.gradients(stacked, [v, w])], [{turns: one} for one in (1, 3)]
        )
