"""The fault proxy's own rules: what is passed on of a stream, in whatever pieces it comes."""

from __future__ import annotations

import pytest

from tests.network.faults import Action, Course, Fault, Step

DATA = bytes(range(20))
CASES: list[tuple[Fault, list[Step]]] = [
    (Fault(Action.RESET, 7), [DATA[:7], Action.RESET, DATA[7:]]),
    (Fault(Action.FINISH, 0), [Action.FINISH, DATA]),
    (Fault(Action.STALL, 20), [DATA, Action.STALL]),
    (Fault(Action.RESET, 21), [DATA]),
    (Fault(Action.REPEAT, 5, count=3), [DATA[:5] + DATA[2:5] + DATA[5:]]),
    (Fault(Action.INSERT, 20, extra=b"late"), [DATA + b"late"]),
    (Fault(Action.FLIP, 19, bit=7), [DATA[:19] + bytes([19 ^ 128])]),
]


def joined(steps: list[Step]) -> list[Step]:
    found: list[Step] = []
    for step in steps:
        if found and isinstance(step, bytes) and isinstance(found[-1], bytes):
            found[-1] += step
        elif step:
            found.append(step)
    return found


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize(
    ("fault", "expected"),
    CASES,
    ids=lambda value: getattr(getattr(value, "action", None), "name", ""),
)
def test_a_fault_happens_at_its_byte_however_the_bytes_come(
    fault: Fault, expected: list[Step], size: int
) -> None:
    course = Course([fault])
    steps = course.feed(b"")
    for at in range(0, len(DATA), size):
        steps += course.feed(DATA[at : at + size])
    assert joined(steps) == expected
    assert course.recorded == DATA


def test_several_faults_happen_in_the_order_of_their_bytes() -> None:
    course = Course([Fault(Action.RESET, 3), Fault(Action.FLIP, 1)])
    assert joined(course.feed(b"abc")) == [b"acc", Action.RESET]
