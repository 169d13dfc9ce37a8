"""Models whose steps exchange few and many values, in either plane; as scenarios.py has its own."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

import prpc_engine.tensorflow as prpc_tf
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.tensorflow import bits, flows, kills, scenarios, semantics, shards, states, traces
from tests.tensorflow.scenarios import Task, error_of, task_server

v1 = tf.compat.v1
BATCH = 16


def in_plane(task: Task, plane: str, fuse: bool, which: str, **keywords: Any) -> Any:
    """Another scenario, in that plane."""
    os.environ["PRPC_TF_PLANE"], task.fuse = plane, fuse
    try:
        modules = (scenarios, semantics, flows, kills, traces, states, shards, bits)
        known = {name: value for module in modules for name, value in vars(module).items()}
        return {**known, **globals()}[which](task, **keywords)
    finally:
        del os.environ["PRPC_TF_PLANE"]
        task.fuse = False


def _softmax(variables: int) -> tuple[Any, Any, Any]:
    x, labels = v1.placeholder(tf.float32, [None, 20]), v1.placeholder(tf.int64, [None])
    weights = v1.get_variable("w", [20, 5], initializer=v1.glorot_uniform_initializer(seed=1))
    return (
        [x],
        labels,
        tf.matmul(x, weights) + v1.get_variable("b", [5], initializer=v1.zeros_initializer()),
    )


def _tables(variables: int) -> tuple[Any, Any, Any]:
    """An embedding and a projection for each two variables."""
    ids = [v1.placeholder(tf.int64, [None]) for _ in range(variables // 2)]
    labels, scores = v1.placeholder(tf.int64, [None]), []
    for index, one in enumerate(ids):
        fixed = v1.glorot_uniform_initializer(seed=index)
        table = v1.get_variable(f"table{index}", [50, 8], initializer=fixed)
        scores.append(
            tf.matmul(
                tf.nn.embedding_lookup(table, one),
                v1.get_variable(f"p{index}", [8, 5], initializer=fixed),
            )
        )
    return ids, labels, tf.add_n(scores)


def _model(variables: int) -> tuple[Any, Any, Any, Any]:
    inputs, labels, scores = (_softmax if variables == 2 else _tables)(variables)
    loss = v1.losses.sparse_softmax_cross_entropy(labels, scores)
    return (
        inputs,
        labels,
        loss,
        v1.train.AdagradOptimizer(0.1).minimize(loss, v1.train.get_or_create_global_step()),
    )


def _fed(inputs: Any, labels: Any, rng: Any) -> dict[Any, Any]:
    fed = {
        one: rng.rand(BATCH, 20) if one.dtype == tf.float32 else rng.randint(0, 50, BATCH)
        for one in inputs
    }
    return {**fed, labels: rng.randint(0, 5, BATCH)}


def losses(task: Task, variables: int, steps: int = 5) -> Any:
    """Of a model with so many variables."""
    rng = np.random.RandomState(0)
    with task.graph(), task.setter():
        inputs, labels, loss, op = _model(variables)
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            return [session.run([op, loss], _fed(inputs, labels, rng))[1] for _ in range(steps)]


def messages(task: Task, variables: int) -> Any:
    """What one step of it takes."""
    rng = np.random.RandomState(0)
    with task.graph(), task.setter():
        inputs, labels, loss, op = _model(variables)
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            session.run([op, loss], _fed(inputs, labels, rng))
            before = dataclasses.asdict(prpc_tf.statistics(session))
            session.run([op, loss], _fed(inputs, labels, rng))
            after = dataclasses.asdict(prpc_tf.statistics(session))
            return {name: after[name] - before[name] for name in after}


def left_behind(task: Task) -> Any:
    """What waits at this task, in whichever step: values that nobody asked for, and requests
    without an answer.
    """
    return task_server(task.server).engine.statistics().waiting


def from_ps_to_ps(task: Task) -> Any:
    """A value, a string and an order go from one ps to the other, without a detour."""
    with task.graph():
        with v1.device("/job:ps/task:0"):
            v = v1.get_variable("v", [3], initializer=v1.ones_initializer())
            changed = v1.assign_add(v, [1.0, 2.0, 3.0])
            text = tf.strings.as_string(changed)
        with v1.device("/job:ps/task:1"):
            w = v1.get_variable("w", [3], initializer=v1.zeros_initializer())
            with tf.control_dependencies([changed]):
                later = v1.assign_add(w, [5.0, 5.0, 5.0])
            both = tf.strings.join([text, tf.strings.as_string(later + changed)], "+")
        with v1.device("/job:ps/task:0"):
            back = tf.strings.length(both)
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            return [session.run([both, back]) for _ in range(2)]


def failing(task: Task) -> Any:
    """An op of one ps fails while the other, and the worker, wait for values of it; then the
    session goes on.
    """
    with task.graph():
        divisor = v1.placeholder(tf.int32, [])
        with v1.device("/job:ps/task:0"):
            there = tf.math.floordiv(6, divisor, name="divided")
        with v1.device("/job:ps/task:1"):
            twice = there * 2
        with task.session() as session:
            found = [session.run(twice, {divisor: 2})]
            for _ in range(2):
                found.append(error_of(lambda: session.run(twice + 1, {divisor: 0}))[0])
                found.append(session.run(twice, {divisor: 3}))
            return found


def failing_while_it_waits(task: Task) -> Any:
    """An op of a ps fails while the worker waits for a queue of its own, and for nothing else; the
    next step takes from it.
    """
    with task.graph():
        with v1.device(f"/job:{task.job}/task:{task.index}"):
            line = v1.FIFOQueue(3, [tf.float32], [[]])
            item = line.dequeue()
        divisor = v1.placeholder(tf.int32, [])
        with v1.device("/job:ps/task:0"):
            there = tf.math.floordiv(6, divisor)
        with task.session() as session:
            kind = error_of(lambda: session.run([item, there.op], {divisor: 0}))[0]
            session.run(line.enqueue(2.5))
            return [kind, session.run([item, there], {divisor: 2}), session.run(line.size())]


def failing_while_a_ps_waits(task: Task) -> Any:
    """An op of one ps fails while another waits for a queue; what comes into the queue later is
    still there.
    """
    with task.graph():
        with v1.device("/job:ps/task:1"):
            line = v1.FIFOQueue(
                3, [tf.float32], [[]], shared_name=v1.get_variable_scope().name + "_line"
            )
            item = line.dequeue()
        divisor = v1.placeholder(tf.int32, [])
        with v1.device("/job:ps/task:0"):
            there = tf.math.floordiv(6, divisor)
        with task.session(operation_timeout_in_ms=20_000) as session:
            kind = error_of(lambda: session.run([item, there], {divisor: 0}))[0]
            session.run(line.enqueue(2.5))
            return [kind, session.run(line.size())]


def continued_in_another_thread(task: Task) -> Any:
    """How long the call may take that a step with 100 s makes, when a step with 50 s has given it
    what it waited for.
    """
    with task.graph():
        with v1.device(f"/job:{task.job}/task:{task.index}"):
            line = v1.FIFOQueue(3, [tf.float32], [[]])
            item, put = line.dequeue(), line.enqueue(2.5)
        with v1.device("/job:ps/task:0"):
            twice = item * 2.0
        with task.session() as session:
            session.run(put)
            session.run(twice)
            plane, found, asked = session._prpc, [], []
            engine = plane._server.engine
            plane._server.engine = SimpleNamespace(
                ask=lambda *named: asked.append(named[4]) or engine.ask(*named)
            )
            try:
                options = [v1.RunOptions(timeout_in_ms=1000 * seconds) for seconds in (100, 50)]
                thread = threading.Thread(
                    target=lambda: found.append(session.run(twice, options=options[0]))
                )
                thread.start()
                wait_until(lambda: any(step.runs for step in plane._steps.values()), "the wait")
                session.run(put, options=options[1])
                thread.join(PATIENCE_S)
            finally:
                plane._server.engine = engine
            return [found, len(asked), [50 < one <= 100 for one in asked]]


def death_of_a_ps(task: Task, pid: int) -> Any:
    """A ps is killed between two steps of a session; the error that the steps after it end with."""
    rng = np.random.RandomState(0)
    with task.graph(), task.setter():
        inputs, labels, loss, op = _model(2)
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            session.run([op, loss], _fed(inputs, labels, rng))
            os.kill(pid, signal.SIGKILL)
            return error_of(
                lambda: [session.run([op, loss], _fed(inputs, labels, rng)) for _ in range(10_000)]
            )[0]


def closed_while_it_waits(task: Task) -> Any:
    """A step of which one part waits for a queue of a ps, and the rest has run there, when its
    session is closed.
    """
    with task.graph(), task.setter():
        with v1.device("/job:ps/task:0"):
            line = v1.FIFOQueue(
                3, [tf.float32], [[]], shared_name=v1.get_variable_scope().name + "_line"
            )
            v = v1.get_variable("v", [], initializer=v1.zeros_initializer())
            later = v1.assign_add(v, line.dequeue())
        begun, found = v1.assign_add(v, 1.0), []
        with task.session() as other:
            other.run(v1.global_variables_initializer())
            session = task.session()
            thread = threading.Thread(
                target=lambda: found.append(error_of(lambda: session.run([begun, later])))
            )
            thread.start()
            while other.run(v) == 0.0:
                pass
            session.close()
            thread.join(30.0)
            other.run(line.enqueue(1.0))
            return [found[0][0], other.run([v, line.size()])]
