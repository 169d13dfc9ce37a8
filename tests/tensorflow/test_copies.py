"""A large tensor is copied once on its way between two tasks of a host, and every copy is
counted.
"""

from __future__ import annotations

from tests.tensorflow.tasks import Job

MIB = 1 << 20


def test_a_pull_is_fed_where_the_ps_left_it(job: Job) -> None:
    took, memory, last = job.worker().do("pulled_and_pushed", "prpc", floats=MIB // 4)
    assert memory.startswith("/memfd:prpc.")
    assert took["leased"] >= 1
    assert MIB <= took["bytes_received"] <= 3 * MIB
    assert took["bytes_copied_after"] < 1024
    assert last == 9.0  # 1, 3, 9


def test_a_push_is_copied_once(job: Job) -> None:
    took, _, _ = job.worker().do("pulled_and_pushed", "prpc", floats=MIB // 4)
    assert took["bytes_sent"] >= MIB
    assert took["bytes_copied_before"] == took["bytes_sent"]


def test_what_travels_within_its_message_counts_as_copied_at_both_ends(job: Job) -> None:
    took, memory, _ = job.worker().do("pulled_and_pushed", "prpc", floats=256)
    assert took["leased"] == 0
    assert not memory.startswith("/memfd:prpc.")
    assert 1024 <= took["bytes_received"] == took["bytes_copied_after"]


def test_strings_are_joined_to_be_sent_and_cut_when_they_arrive(job: Job) -> None:
    took = job.worker().do("texts", "prpc")
    assert took["bytes_sent"] == len("abc")
    assert took["bytes_copied_before"] == 2 * len("abc")
    assert took["bytes_received"] == len("a!bc!")
    assert took["bytes_copied_after"] == 2 * len("a!bc!")
