"""What scenarios of tasks with shards ask about them, as those of scenarios.py."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from tests.tensorflow.scenarios import Task, said, task_server

v1 = tf.compat.v1
VARIABLES = 6
LARGE = 1 << 20
_open: list[Any] = []


def processes(task: Task) -> Any:
    """The pids of this task's shards."""
    return task_server(task.server).pids_of_shards


def fork(task: Task) -> int:
    """A process forked from this one, which has all its pipes, and stays until it is killed."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid


def join(task: Task) -> Any:
    """What join() raises."""
    return said(task.server.join)


def threads_of_kernels(task: Task) -> Any:
    """How many this process has for one op."""
    return task_server(task.server).config.intra_op_parallelism_threads


def spread(task: Task) -> Any:
    """Of steps that read and update some variables of a ps: what comes of them, and how many
    requests each process of the ps got.
    """
    engine = task_server(task.server).engine
    with task.graph(), v1.device("/job:ps/task:0"):
        made = [
            v1.get_variable(f"v{number}", [4], initializer=v1.ones_initializer(), use_resource=True)
            for number in range(VARIABLES)
        ]
        updates = [one.assign_add(tf.ones([4]) * number) for number, one in enumerate(made)]
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            before = engine.statistics().links
            for _ in range(3):
                session.run([one.op for one in updates])
            after = engine.statistics().links
            values = session.run(made)
    requests = {name: after[name].requests - before[name].requests for name in after}
    return [[one.tolist() for one in values], requests]


def write(task: Task, name: str, value: float) -> None:
    """Into all of the variables of that name, which other workers read."""
    with task.graph(name):
        made = _made()
        with task.session() as session:
            session.run([one.assign(np.full(2, value, np.float32)).op for one in made])


def read(task: Task, name: str, order: int = 1) -> Any:
    """All of them, by a graph that has them in another order."""
    with task.graph(name):
        made = _made(order)
        with task.session() as session:
            return session.run([one[0] for one in made])


def _made(order: int = 1) -> list[Any]:
    with v1.device("/job:ps/task:0"):
        made = {
            number: v1.get_variable(f"v{number}", [2], use_resource=True)
            for number in range(VARIABLES)[::order]
        }
    return [made[number] for number in range(VARIABLES)]


def open_steps(task: Task) -> Any:
    """A session whose steps use all processes of the ps."""
    with task.graph(), v1.device("/job:ps/task:0"):
        made = [
            v1.get_variable(f"v{number}", [2], initializer=v1.ones_initializer())
            for number in range(VARIABLES)
        ]
        op = tf.group(*(v1.assign_add(one, [1.0, 1.0]).op for one in made))
        session = task.session()
        session.run(v1.global_variables_initializer())
        _open.append((session, op, made))


def steps_until_an_error(task: Task, steps: int = 100_000) -> Any:
    """What they end with."""
    session, op, _ = _open[-1]
    return said(lambda: [session.run(op) for _ in range(steps)])


def open_waits(task: Task) -> Any:
    """A session, and steps that take an item of a queue each. Each process of the ps has some of
    the queues, as they are where variables are.
    """
    with task.graph(), v1.device("/job:ps/task:0"):
        queues = []
        for number in range(VARIABLES):
            variable = v1.get_variable(f"v{number}", [2], use_resource=True)
            with v1.colocate_with(variable.op):
                queues.append(v1.FIFOQueue(3, [tf.float32], [[]], name=f"q{number}"))
        session = task.session()
        steps = [one.dequeue() for one in queues]
        session.run([one.enqueue(1.0) for one in queues])
        for step in steps:  # each is registered, and waits for no process when it runs again
            session.run(step)
        _open.append((session, steps, None))


def waits_until_an_end(task: Task) -> Any:
    """Of those steps, all at once: the kinds of errors that they end with."""
    session, steps, _ = _open[-1]
    kinds: set[str] = set()
    threads = [
        threading.Thread(target=lambda step=step: kinds.add(said(lambda: session.run(step))[0]))
        for step in steps
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return sorted(kinds)


def used_together_too_late(task: Task) -> Any:
    """Two variables, larger than all others, that were dealt out before an op uses both."""
    ones = v1.ones_initializer()
    with task.graph(), v1.device("/job:ps/task:0"):
        made = [
            v1.get_variable(f"v{number}", [LARGE], initializer=ones, use_resource=True)
            for number in range(2)
        ]
        with task.session() as session:
            session.run([one.initializer for one in made])
            both = tf.raw_ops.ResourceApplyMomentum(
                var=made[0].handle,
                accum=made[1].handle,
                lr=1.0,
                grad=tf.ones([LARGE]),
                momentum=0.5,
            )
            return said(lambda: session.run(both))
