"""Sessions at a master in another process, as scenarios of a task "client" (scenarios.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.tensorflow.scenarios import Task, said

v1 = tf.compat.v1
_open: list[Any] = []


def in_graph(task: Task, workers: int, steps: int = 5) -> Any:
    """In-graph replication: one client builds towers for all workers, and their gradients go to
    variables of the ps.
    """
    with task.graph():
        with v1.device("/job:ps/task:0"):
            weights = v1.get_variable(
                "w", [4, 2], initializer=v1.glorot_uniform_initializer(seed=3)
            )
            biases = v1.get_variable("b", [2], initializer=v1.zeros_initializer())
        optimizer, towers, losses = v1.train.MomentumOptimizer(0.1, 0.9), [], []
        for worker in range(workers):
            with v1.device(f"/job:worker/task:{worker}"):
                x = tf.constant(np.arange(12).reshape(3, 4) / (7.0 + worker), tf.float32)
                scores = tf.matmul(x, weights) + biases
                losses.append(tf.reduce_mean(tf.square(scores - [0.5, -0.5])))
                towers.append(optimizer.compute_gradients(losses[-1], [weights, biases]))
        with v1.device("/job:ps/task:0"):
            means = [
                (tf.add_n([grad for grad, _ in of_one]) / float(workers), of_one[0][1])
                for of_one in zip(*towers, strict=True)
            ]
            op = optimizer.apply_gradients(means)
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            return [session.run([*losses, op])[:-1] for _ in range(steps)]


def without_devices(task: Task, name: str, value: float) -> Any:
    """A variable that no device is said for lives at the master, where the next client finds it."""
    with task.graph(name):
        v = v1.get_variable("v", [2], initializer=v1.zeros_initializer())
        with task.session() as session:
            before = session.run(v1.is_variable_initialized(v))
            session.run(v.initializer if not before else tf.no_op())
            return [bool(before), session.run(v1.assign_add(v, [value, value]))]


def monitored(task: Task, steps: int) -> Any:
    """A chief that has no server."""
    with task.graph(), task.setter():
        step = v1.train.get_or_create_global_step()
        op = v1.assign_add(step, 1)
        with v1.train.MonitoredTrainingSession(
            task.server.target, hooks=[v1.train.StopAtStepHook(num_steps=steps)]
        ) as session:
            while not session.should_stop():
                at = session.run(op)
        return at


def at(task: Task, target: str, timeout_ms: int = 0) -> Any:
    """What one op, without a device, comes to at that target."""
    with tf.Graph().as_default():
        value = tf.constant(2.0) + v1.placeholder_with_default(1.0, [])
        config = v1.ConfigProto(operation_timeout_in_ms=timeout_ms)

        def run() -> None:
            with v1.Session(target, config=config) as session:
                _open.append(session.run(value))

        error = said(run)
        return error if error[0] else float(_open.pop())


def is_own(task: Task, target: str) -> bool:
    """Whether it is the target of this process's server."""
    from prpc_engine.tensorflow.server import server_of

    return server_of(target) is not None


def metadata(task: Task) -> Any:
    """Of which devices RunMetadata tells something."""
    with task.graph(), v1.device("/job:ps/task:0"):
        v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
        with v1.device("/job:worker/task:0"):
            total = tf.reduce_sum(v)
        with task.session() as session:
            session.run(v.initializer)
            told = v1.RunMetadata()
            options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
            session.run(total, options=options, run_metadata=told)
            return sorted({one.device for one in told.step_stats.dev_stats})


def begin_waiting(task: Task, name: str) -> Any:
    """A step that waits for a queue of a ps, and ends with this process."""
    with task.graph(name), v1.device("/job:ps/task:0"):
        item = v1.FIFOQueue(3, [tf.float32], [[]], shared_name=name).dequeue()
        with task.session() as session:
            return said(lambda: session.run(item))


def taken_after(task: Task, name: str) -> Any:
    """What is put there then is there for the next one."""
    with task.graph(name), v1.device("/job:ps/task:0"):
        line = v1.FIFOQueue(3, [tf.float32], [[]], shared_name=name)
        put, item = line.enqueue([5.0]), line.dequeue()
        with task.session() as session:
            session.run(put)
            return float(session.run(item))
