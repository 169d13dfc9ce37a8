"""Which ops wait for the stage that needs them: on names alone, without TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.tensorflow.postpone import postpone


@dataclass
class Stage:
    """Of one task, unless its key says otherwise."""

    key: object = "ps"
    members: list[str] = field(default_factory=list)


def stages_after(
    before: list[str], uses: str, movable: str, keys: tuple[str, ...] = (), waits: str = ""
) -> list[str]:
    """Members of each stage, before and after; `uses` and `waits`: "b<a c<b". One letter a node,
    "." in no stage.
    """
    keys = keys or ("ps",) * len(before)
    stages = [Stage(key, list(members)) for key, members in zip(keys, before, strict=True)]
    stage_of = {name: stage for stage in stages for name in stage.members}
    sources: dict[str, list[str]] = {}
    controls: dict[str, list[str]] = {}
    for text, found in ((uses, sources), (waits, controls)):
        for one in text.split():
            user, _, source = one.partition("<")
            found.setdefault(user, []).append(source)
    order = sorted(
        {*stage_of, *sources, *controls, *(s for many in sources.values() for s in many)}
    )
    full = {name: sources.get(name, []) for name in order}
    postpone(order, stage_of, full, {name: controls.get(name, []) for name in order}, set(movable))
    assert all(stage_of[name] is stage for stage in stages for name in stage.members)
    return ["".join(stage.members) for stage in stages]


@pytest.mark.parametrize(
    ("before", "uses", "movable", "after"),
    [
        (["bcd", "e"], "b<a c<b d<c e<d e<b", "bcd", ["", "bcde"]),  # a is the own task's
        (["bcd", "e"], "c<b d<c e<d", "cd", ["bcd", "e"]),  # b reads a variable
        (["bcd", "e"], "b<a c<b d<b e<c e<d", "bc", ["bcd", "e"]),  # d needs b where it is
        (["b", "c", "d"], "b<a c<b d<b", "b", ["b", "c", "d"]),  # two stages need it
        (["b", "c", "d"], "b<a c<b d<c", "bc", ["", "", "bcd"]),
        (["b", ".", "d"], "b<a e<b d<b", "b", ["b", ".", "d"]),  # so does e of the own task
        (["b", "c"], "c<a", "b", ["b", "c"]),  # nobody needs it
    ],
)
def test_an_op_waits_for_the_one_stage_that_needs_it(
    before: list[str], uses: str, movable: str, after: list[str]
) -> None:
    assert stages_after(before, uses, movable) == after


def test_it_stays_with_its_task_and_its_branches() -> None:
    assert stages_after(["b", "c"], "b<a c<b", "b", ("ps 0", "ps 1")) == ["b", "c"]


def test_who_waits_for_it_needs_it_too() -> None:
    assert stages_after(["bd", "c"], "b<a c<b", "b", waits="d<b") == ["bd", "c"]
    assert stages_after(["b", "c"], "b<a", "b", waits="c<b") == ["", "bc"]


@given(st.data())
def test_no_value_goes_over_that_did_not_before_and_all_is_there_when_it_is_used(
    data: st.DataObject,
) -> None:
    names = "abcdefghijklmnop"
    stages = [Stage() for _ in range(4)]
    sources: dict[str, list[str]] = {}
    at: dict[str, int] = {}
    for number, name in enumerate(names):
        sources[name] = (
            data.draw(st.lists(st.sampled_from(names[:number]), max_size=3)) if number else []
        )
        first = max((at[source] for source in sources[name]), default=0)
        at[name] = data.draw(st.integers(first, 3))
        stages[at[name]].members.append(name)
    stage_of = {name: stages[place] for name, place in at.items()}
    movable = data.draw(st.sets(st.sampled_from(names)))

    def crossing() -> set[str]:
        return {
            source
            for name in names
            for source in sources[name]
            if stage_of[source] is not stage_of[name]
        }

    before = crossing()
    postpone(names, stage_of, sources, {name: [] for name in names}, movable)
    assert crossing() <= before
    assert sorted(name for stage in stages for name in stage.members) == sorted(names)
    for place, stage in enumerate(stages):
        for number, name in enumerate(stage.members):
            assert stage_of[name] is stage
            assert name in movable or at[name] == place
            for source in sources[name]:
                if stage_of[source] is stage:
                    assert source in stage.members[:number]
                else:
                    assert stages.index(stage_of[source]) < place
