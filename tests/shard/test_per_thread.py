"""A value for each thread."""

from __future__ import annotations

import threading

from shard.loop.per_thread import PerThread
from tests.shard.processes import in_fork


def test_each_thread_sees_what_it_has_set_and_else_the_usual_value() -> None:
    kept = PerThread("usual")
    kept.value = "mine"
    seen: list[str] = []

    def look_set_and_look() -> None:
        seen.append(kept.value)
        kept.value = "another's"
        seen.append(kept.value)
        kept.value = "usual"

    thread = threading.Thread(target=look_set_and_look)
    thread.start()
    thread.join()
    assert seen == ["usual", "another's"]
    assert kept.value == "mine"
    kept.value = "usual"
    assert not kept.others, "as nobody has another one"


def test_a_fork_has_the_value_of_the_thread_that_forked_and_of_no_other() -> None:
    kept = PerThread(0)
    kept.value = 1
    may_end, has_set = threading.Event(), threading.Event()

    def set_and_stay() -> None:
        kept.value = 2
        has_set.set()
        may_end.wait()
        kept.value = 0

    thread = threading.Thread(target=set_and_stay)
    thread.start()
    has_set.wait()

    def only_one_is_left() -> None:
        assert list(kept.others.values()) == [1]

    assert in_fork(only_one_is_left) == 0
    may_end.set()
    thread.join()
