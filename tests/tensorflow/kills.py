"""Scenarios in whose midst a task is killed with -9, and what a session leaves at tasks, for tests:
as those of scenarios.py.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from prpc_engine.tensorflow import session_owners, stalls
from tests.program import halt
from tests.prpc_engine.processes import PATIENCE_S, wait_until
from tests.tensorflow.scenarios import Task, error_of, task_server

v1 = tf.compat.v1
_open: list[Any] = []


def kill_in_step(task: Task, floats: int, victim: int, moment: str, ps: int = 0) -> Any:
    """A step that reads a variable of a ps and adds to it, in which process `victim`, 0 for this
    one, is killed: while the worker "computes" with the value, or "pushes" what it made of it to
    the `ps`, which has been stopped before."""
    victim = victim or os.getpid()
    with task.graph(), task.setter():
        v = v1.get_variable("v", [floats], initializer=v1.ones_initializer())

        def compute(value: Any) -> Any:
            if moment == "computes":
                _kill(victim)
            else:
                halt(ps)
                threading.Thread(target=kill_once_it_pushes).start()
            return value + np.float32(1)

        with v1.device(f"/job:{task.job}/task:{task.index}"):
            larger = v1.py_func(compute, [v], tf.float32)
        larger.set_shape([floats])
        op = v1.assign_add(v, larger)
        with task.session() as session:

            def kill_once_it_pushes() -> None:
                wait_until(lambda: session._prpc.calls_under_way, "the push")
                _kill(victim)

            session.run(v1.global_variables_initializer())
            session.run(op.op)


def interrupted(task: Task, name: str) -> Any:
    """A step that waits at a ps, until Ctrl-C; and what is put there then is there for the next."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with task.graph(), v1.device("/job:ps/task:0"), task.session() as session:
            line = v1.FIFOQueue(3, [tf.float32], [[]], shared_name=name)
            put, item = line.enqueue([5.0]), line.dequeue()
            try:
                session.run(item)
            except KeyboardInterrupt:
                session.run(put)
            return float(session.run(item))
    finally:
        signal.signal(signal.SIGINT, before)


def add_one(task: Task, floats: int) -> Any:
    """A step as that one, in which nobody is killed; the sum of what is there after it."""
    with task.graph(), task.setter():
        v = v1.get_variable("v", [floats], initializer=v1.ones_initializer())
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            session.run(v1.assign_add(v, tf.ones([floats])).op)
            return float(session.run(v).sum())


def held(task: Task) -> Any:
    """What this task keeps for sessions and peers now."""
    server = task_server(task.server)
    engine, stages = server.engine.statistics(), server.stages.statistics()
    return {
        "stages of open sessions": stages.stages - stages.idle,
        "running": stages.running + server.programs.statistics().running,
        "waiting": engine.waiting,
        "leases": engine.slab.leases,
        "blocks": engine.slab.blocks_used,
    }


def gone_after(task: Task, seconds: float) -> None:
    """From now on, how long the sessions of a process are kept that is gone."""
    session_owners.GONE_S = seconds


def kept(task: Task) -> Any:
    """How many stages there are here, with and without a session; and how many programs."""
    server = task_server(task.server)
    return [server.stages.statistics().stages, server.programs.statistics().programs]


def open_session(task: Task) -> Any:
    """A session that pulls a megabyte from a ps, that has a random generator there, and that waits
    for a queue.
    """
    with task.graph(), task.setter():
        v = v1.get_variable("v", [1 << 18], initializer=v1.ones_initializer())
        with v1.device("/job:ps/task:0"):
            noise = v1.random_uniform([], seed=3)
            item = v1.FIFOQueue(
                3, [tf.float32], [[]], shared_name=v1.get_variable_scope().name
            ).dequeue()
        with v1.device(f"/job:{task.job}/task:{task.index}"):
            total = tf.reduce_sum(v) + noise
        session = task.session()
        session.run(v1.global_variables_initializer())
        session.run(total)
        waiting = threading.Thread(target=lambda: error_of(lambda: session.run(item)))
        waiting.start()
        _open.append((session, waiting))


def close_session(task: Task) -> Any:
    """The end of that session; and whether what waited has ended."""
    session, waiting = _open.pop()
    session.close()
    waiting.join(PATIENCE_S)
    return not waiting.is_alive()


def _kill(process: int) -> None:
    """And wait until it is dead: not when it is this one."""
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: _is_dead(process), f"the end of process {process}")


def _is_dead(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def step_while_halted(task: Task, ps: int, name: str) -> Any:
    """A step of a ps that is stopped, and goes on once a line has named it; what the log says of
    it. Another one waits for a queue meanwhile, and nothing is said of that.
    """
    told: list[str] = []
    logger, heard = logging.getLogger("prpc"), logging.Handler()
    heard.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(heard)
    before = stalls.STALL_S, stalls.LOOK_S
    stalls.STALL_S, stalls.LOOK_S = 0.3, 0.1
    try:
        with task.graph(), v1.device("/job:ps/task:0"):
            v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
            line = v1.FIFOQueue(1, [tf.float32], [[]], shared_name=name)
            item, put = line.dequeue(), line.enqueue([1.0])
            op = v1.assign_add(v, [1.0, 1.0]).op
            with task.session() as session:
                session.run(v.initializer)
                waiting = threading.Thread(target=lambda: session.run(item))
                waiting.start()
                session.run(op)
                halt(ps)
                step = threading.Thread(target=lambda: session.run(op))
                step.start()
                wait_until(lambda: any("not answered" in one for one in told), "the line")
                os.kill(ps, signal.SIGCONT)
                step.join(PATIENCE_S)
                wait_until(lambda: any("answers again" in one for one in told), "the other line")
                session.run(put)
                waiting.join(PATIENCE_S)
                return told
    finally:
        os.kill(ps, signal.SIGCONT)
        stalls.STALL_S, stalls.LOOK_S = before
        logger.removeHandler(heard)
