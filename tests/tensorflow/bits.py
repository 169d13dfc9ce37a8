"""Scenarios of steps that are run bit by bit, as those of scenarios.py."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.tensorflow.scenarios import Task, said

v1 = tf.compat.v1


def bit_by_bit(task: Task) -> Any:
    """What steps come to of which each bit feeds the next one."""
    with task.graph(), task.setter():
        a, b, c = (v1.placeholder(tf.float32, [], name) for name in "abc")
        total = a + b
        product = total * c
        with task.session() as session:
            step = session.partial_run_setup([total, product], [a, b, c])
            first = session.partial_run(step, total, {a: 1.0, b: 2.0})
            found = [first, session.partial_run(step, product, {c: first * 17.0})]
            step = session.partial_run_setup([product, total], [a, b, c])
            found.append(session.partial_run(step, [], {a: 1.0}))  # the feeds come one by one
            found.append(session.partial_run(step, {"total": total}, {b: 1.0}))
            found.append(session.partial_run(step, (product,), {c: 3.0}))
            step = session.partial_run_setup([product], [total, c])  # within the graph
            found.append(session.partial_run(step, product, {total: 4.0, c: 2.0}))
            return found


def effects_in_bits(task: Task, resource: bool) -> Any:
    """Of steps that change a variable of the ps, draw numbers and run a target: each does it once,
    whatever bits it has.
    """
    with task.graph(), task.setter():
        a, b = (v1.placeholder(tf.float32, [], name) for name in "ab")
        v = v1.get_variable("v", [], initializer=v1.zeros_initializer(), use_resource=resource)
        w = v1.get_variable("w", [], initializer=v1.zeros_initializer(), use_resource=resource)
        added, drawn = v1.assign_add(v, 1.0), v1.random_uniform([])
        early, late = added * a, added + b
        with tf.control_dependencies([early]):
            then = tf.identity(b)
        first, second = drawn * a, drawn * b
        changed = tf.group(v1.assign_add(w, 10.0))
        with task.session() as session:
            session.run(v1.global_variables_initializer())
            step = session.partial_run_setup([early, late, then], [a, b])
            found = [
                session.partial_run(step, early, {a: 2.0}),
                session.partial_run(step, [late, then], {b: 5.0}),
                session.run(v),
            ]
            step = session.partial_run_setup([first, second, changed], [a, b])
            values = [
                session.partial_run(step, one, {by: 1.0}) for one, by in ((first, a), (second, b))
            ]
            return [*found, values[0] == values[1], session.run([v, w])]


def mistaken_bits(task: Task) -> Any:
    """What the errors are of."""
    with task.graph(), task.setter():
        a, b, c = (v1.placeholder(tf.float32, [], name) for name in "abc")
        total = a + b
        product, group = total * c, tf.group(total)
        with task.session() as session:

            def begun() -> Any:
                step = session.partial_run_setup([total, product, group], [a, b, c])
                session.partial_run(step, total, {a: 1.0, b: 2.0})
                return step

            tried = [
                said(lambda: session.partial_run_setup([], [])),
                said(lambda: session.partial_run("no handle", total, {a: 1.0})),
                said(lambda: session.partial_run(begun(), a + c, {c: 1.0})),
                said(lambda: session.partial_run(begun(), total)),
                said(lambda: session.partial_run(begun(), product, {a: 1.0, c: 1.0})),
                said(lambda: session.partial_run(begun(), product)),
                said(lambda: session.partial_run(begun(), group, {c: 1.0})),
            ]
            step = begun()
            said(lambda: session.partial_run(step, product))  # refused: the step goes on
            found = [session.partial_run(step, product, {c: 2.0})]
            tried.append(said(lambda: session.partial_run(step, [], {c: 1.0})))  # it is over
        tried.append(said(lambda: session.partial_run_setup([total], [a, b])))  # closed
        return [tried, found]


def kept_variant(task: Task) -> Any:
    """A list of tensors that one bit makes and the next one takes."""
    with task.graph(), task.setter():
        a, b = (v1.placeholder(tf.float32, [], name) for name in "ab")
        made = tf.raw_ops.TensorListFromTensor(
            tensor=tf.stack([a, a]), element_shape=tf.constant([], tf.int32)
        )
        size = tf.raw_ops.TensorListLength(input_handle=made)
        item = tf.raw_ops.TensorListGetItem(
            input_handle=made,
            index=tf.cast(b, tf.int32),
            element_shape=tf.constant([], tf.int32),
            element_dtype=tf.float32,
        )
        with task.session() as session:
            step = session.partial_run_setup([size, item], [a, b])
            return said(lambda: session.partial_run(step, size, {a: 1.0}))
