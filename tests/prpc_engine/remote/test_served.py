"""What a worker refuses that was meant for another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prpc_engine.remote.functions import ValueGone
from prpc_engine.remote.members import Members
from prpc_engine.remote.outcomes import Raised
from prpc_engine.remote.running import Runner
from prpc_engine.remote.served import Served

BEFORE, NOW, CREATOR = 1, 2, 9


def served(only_exposed: bool = False) -> Served:
    """Of a worker that has the rank which another one had."""
    members: Any = Members("now", NOW, SimpleNamespace(), print, print)  # type: ignore[arg-type]
    sections = SimpleNamespace(enter=lambda: None, leave=lambda section: False)
    driver: Any = SimpleNamespace(sections=sections, reactor=None)
    runner = Runner(driver, 1)
    nothing: Any = None
    return Served(members, nothing, runner, nothing, only_exposed)


def raised(answer: Any, may_pickle: bool = True) -> BaseException:
    assert type(answer) is Raised
    return answer.error("there", may_pickle)


@pytest.mark.parametrize(
    "answer",
    [
        lambda ours: ours.create(BEFORE, CREATOR, 1, CREATOR, 1, "builtins:len", None, "four"),
        lambda ours: ours.create_by_method(
            BEFORE, CREATOR, 1, "upper", CREATOR, 2, CREATOR, 2, None
        ),
    ],
)
def test_a_value_is_not_made_by_the_next_worker_of_its_owners_rank(answer: Any) -> None:
    """It would have the number of a value that its creator has this one make."""
    assert isinstance(raised(answer(served())), ValueGone)
