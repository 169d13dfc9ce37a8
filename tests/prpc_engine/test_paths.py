"""Which path is tried first, which rests and for how long, and what is news."""

from __future__ import annotations

import pytest

from prpc_engine.rpc.paths import (
    FAILURES_MAX,
    HEALTHY_S,
    PAIRS_MAX,
    REST,
    Choice,
    Paths,
    Refusal,
)

NODE = "memory://1"
BOTH = ("shm", "tcp")


def over(transport: str, now: float, *refusals: Refusal) -> Choice:
    return Choice(transport, f"{transport}://peer", "tcp://node:1", refusals, now)


def order(paths: Paths, now: float, node: str = NODE) -> list[str]:
    return [name for name, _ in paths.arrange(node, BOTH, now)]


@pytest.fixture
def paths() -> Paths:
    return Paths()


@pytest.fixture
def resting(paths: Paths) -> Paths:
    """shm broke so often that it rests, from second 0 on."""
    for _ in range(FAILURES_MAX):
        paths.broke(NODE, over("shm", 0.0), "bytes were wrong", 0.0)
    return paths


def test_paths_keep_the_order_of_preference(paths: Paths) -> None:
    assert paths.arrange(NODE, BOTH, 0.0) == [("shm", None), ("tcp", None)]
    assert [name for name, _ in paths.arrange(NODE, ("tcp", "shm"), 0.0)] == ["tcp", "shm"]


def test_a_path_that_broke_is_tried_again_at_once_until_it_has_broken_too_often(
    paths: Paths,
) -> None:
    for _ in range(FAILURES_MAX - 1):
        paths.broke(NODE, over("shm", 0.0), "bytes were wrong", 1.0)
        assert order(paths, 1.0) == ["shm", "tcp"]
    paths.broke(NODE, over("shm", 0.0), "bytes were wrong", 1.0)
    assert order(paths, 1.0) == ["tcp", "shm"], (
        "last, and not gone: it may be the only one that connects"
    )
    assert order(paths, 1.0, "memory://2") == ["shm", "tcp"], "every other node is another matter"


def test_one_that_rests_says_why_and_for_how_long(resting: Paths) -> None:
    assert resting.arrange(NODE, BOTH, 10.0) == [
        ("tcp", None),
        (
            "shm",
            Refusal(
                "shm",
                "failed 3 times in a row, tried again in 20 s: bytes were wrong",
                True,
                REST.first_s - 10.0,
            ),
        ),
    ]


def test_after_its_rest_it_comes_first_again_and_each_failure_more_doubles_the_rest(
    resting: Paths,
) -> None:
    now, rest_s = 0.0, REST.first_s
    for _ in range(40):
        assert order(resting, now + rest_s - 1) == ["tcp", "shm"]
        now += rest_s
        assert order(resting, now) == ["shm", "tcp"]
        resting.broke(NODE, over("shm", now), "again", now)
        rest_s = min(2 * rest_s, REST.max_s)
    assert rest_s == REST.max_s


def test_a_connection_that_lived_makes_up_for_failures_before_it(resting: Paths) -> None:
    resting.broke(NODE, over("shm", REST.first_s), "its peer went", REST.first_s + HEALTHY_S)
    assert order(resting, REST.first_s + HEALTHY_S) == ["shm", "tcp"]


def test_what_does_not_connect_counts_when_another_path_does(paths: Paths) -> None:
    full = Refusal("shm", "no room", True)
    for _ in range(FAILURES_MAX):
        assert order(paths, 5.0) == ["shm", "tcp"]
        paths.took(NODE, over("tcp", 5.0, full))
    assert order(paths, 5.0) == ["tcp", "shm"]
    (rest,) = [refusal for _, refusal in paths.arrange(NODE, BOTH, 6.0) if refusal is not None]
    paths.took(NODE, over("tcp", 6.0, rest))
    assert order(paths, 5.0 + REST.first_s) == ["shm", "tcp"], "resting is no failure"


def test_what_cannot_lead_there_is_no_failure(paths: Paths) -> None:
    elsewhere = Refusal("shm", "another host or network namespace", False)
    for _ in range(FAILURES_MAX):
        choice = over("tcp", 0.0, elsewhere)
        assert not choice.failed
        paths.took(NODE, choice)
    assert order(paths, 0.0) == ["shm", "tcp"]


def test_a_choice_is_news_when_it_is_another_than_before(paths: Paths) -> None:
    assert paths.took(NODE, over("shm", 0.0))
    assert not paths.took(NODE, over("shm", 1.0))
    assert paths.took("memory://2", over("shm", 1.0))
    assert paths.took(NODE, over("tcp", 2.0))
    assert paths.took(NODE, over("shm", 3.0))


def test_nodes_that_come_and_go_do_not_fill_the_memory(paths: Paths) -> None:
    for number in range(PAIRS_MAX + 10):
        paths.took(f"memory://{number}", over("shm", 0.0))
    assert paths.took("memory://0", over("shm", 0.0)), "forgotten, so it is news again"
    assert not paths.took(f"memory://{PAIRS_MAX + 9}", over("shm", 0.0))


def test_a_choice_tells_all_of_it_in_a_line() -> None:
    choice = over("tcp", 0.0, Refusal("verbs", "no device", False), Refusal("shm", "no room", True))
    assert choice.failed
    assert str(choice) == "tcp to tcp://peer; verbs: no device; shm: no room"


def test_a_connection_taken_for_want_of_a_better_one_is_to_be_left_again(resting: Paths) -> None:
    assert over("tcp", 0.0).again_s is None
    assert over("tcp", 0.0, Refusal("shm", "another user (5)", False)).again_s is None
    assert over("tcp", 0.0, Refusal("shm", "no room", True)).again_s == REST.first_s
    (rest,) = [refusal for _, refusal in resting.arrange(NODE, BOTH, 10.0) if refusal is not None]
    assert over("tcp", 10.0, rest).again_s == REST.first_s - 10.0
