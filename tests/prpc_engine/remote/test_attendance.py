"""What is said of a group that did not become complete."""

from __future__ import annotations

from prpc_engine.remote.attendance import Attendant, missing_text

HERE = Attendant("here", 0, 3, True)


def test_those_that_are_there_are_counted_and_the_others_wanted() -> None:
    text, advice = missing_text([Attendant("there", 1, 3, True), HERE], 3, "a file")
    assert text == ("2 of 3 workers are in the group at a file: 'here' (rank 0), 'there' (rank 1)")
    assert advice == "Start the others within Options.init_timeout_s"


def test_who_has_left_does_not_count_and_is_named() -> None:
    text, _ = missing_text([Attendant("there", 1, 3, False), HERE], 3, "a file")
    assert text == (
        "1 of 3 workers are in the group at a file: 'here' (rank 0); came and left: 'there' "
        "(rank 1)"
    )


def test_who_came_with_another_world_size_is_named_with_it() -> None:
    came = [HERE, Attendant("there", 1, 4, False), Attendant("elsewhere", 2, None, True)]
    text, advice = missing_text(came, 3, "a file")
    assert text.startswith("2 of 3 workers are in the group at a file: 'elsewhere' (rank 2), ")
    assert text.endswith(
        "; came and left: 'there' (rank 1); not with the world_size 3 came 'elsewhere' with "
        "none, 'there' with 4"
    )
    assert advice == "Give all workers of a group the same world_size"
