"""Scenarios about where tensors lie, for tests: as those of scenarios.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

import prpc_engine.tensorflow as prpc_tf
from tests.tensorflow.scenarios import Task

v1 = tf.compat.v1


def pulled_and_pushed(task: Task, floats: int) -> Any:
    """A step that reads a variable of a ps and adds to it: what it took, and whose memory an op of
    the worker read it in.
    """
    seen: list[int] = []

    def look(value: Any) -> Any:
        seen.append(value.ctypes.data)
        return np.float32(value[0])

    with task.graph(), task.setter():
        v = v1.get_variable("v", [floats], initializer=v1.ones_initializer())
        with v1.device(f"/job:{task.job}/task:{task.index}"):
            first = v1.py_func(look, [v], tf.float32)
            larger = v * 2.0
        op = v1.assign_add(v, larger)
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            session.run([op.op, first])
            before = dataclasses.asdict(prpc_tf.statistics(session))
            session.run([op.op, first])
            after = dataclasses.asdict(prpc_tf.statistics(session))
            return [
                {name: after[name] - before[name] for name in after},
                _mapping(seen[-1]),
                session.run(v)[-1],
            ]


def texts(task: Task) -> Any:
    """What a step with strings takes that go to a ps and come back."""
    with task.graph():
        fed = v1.placeholder(tf.string, [None])
        with v1.device("/job:ps/task:0"):
            joined = tf.strings.join([fed, "!"])
        with task.session() as session:
            session.run(joined, {fed: ["a", "bc"]})
            return dataclasses.asdict(prpc_tf.statistics(session))


def _mapping(address: int) -> str:
    """The file whose memory it is."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(one, 16) for one in line.split()[0].split("-"))
            if begin <= address < end:
                return " ".join(line.split()[5:])
    raise AssertionError(f"nothing is mapped at {address:x}")
