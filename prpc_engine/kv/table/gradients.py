"""What a table does with gradients that are NaN or infinite, and with those too large for its
formula.

    nonfinite  a gradient that is NaN or infinite
    "refuse"   fails its push: BadArguments names where, and nothing has changed
    "skip"     leaves its row as it is, and counts in TableStatistics.rows_skipped; the other rows
               of the push change
    "apply"    is applied: what values become is the formula's, and mostly NaN for good

A finite gradient is taken as at most Optimizer.gradient_max by formulas that square it or add it up
(optimizer.py).

Almost all gradients are ordinary, and one pass over them shows it: their sum of squares is below a
bound. It costs 0.5 us for 256 of them and 64 us for 1 M (numpy 2.4); applying them takes at least
ten times that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments, ConfigError

NONFINITE = ("refuse", "skip", "apply")
# its square, added to a float32 as often as one likes, never overflows: above 2**104 it adds
# nothing
GRADIENT_MAX = 2.0**40
SQUARES_MAX = GRADIENT_MAX**2
Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def checked_policy(name: object) -> str:
    """`name`, or ConfigError when it is none of NONFINITE."""
    if isinstance(name, str) and name in NONFINITE:
        return name
    raise ConfigError(f"nonfinite is {name!r}; allowed: {', '.join(NONFINITE)}")


def are_ordinary(grads: Floats) -> bool:
    """Whether all are finite and none is above GRADIENT_MAX. False says nothing."""
    # vdot: it takes any shape, and does not warn where it overflows
    return bool(np.vdot(grads, grads) <= SQUARES_MAX)


def check_finite(
    whose: str, grads: Floats, keys: Keys | None = None, what: str = "gradient"
) -> None:
    """BadArguments when one is NaN or infinite; keys: of a sparse push. `whose` ("push to table
    'clicks'") begins the message, `what` says what they are.
    """
    if are_ordinary(grads):
        return
    finite = np.isfinite(grads)
    if finite.all():
        return
    where = tuple(int(each) for each in np.argwhere(~finite)[0])
    of = f"index {list(where)}" if keys is None else f"key {int(keys[where[0]])}, column {where[1]}"
    bad = finite.size - int(finite.sum())
    raise BadArguments(
        f"{whose}: the {what} of {of} is {grads[where]}; {bad} of {finite.size} elements are "
        "NaN or infinite, and "
        "nothing was changed. Scale or clip the loss, or create the table with nonfinite='skip' "
        "to leave such rows as they are"
    )


@contextlib.contextmanager
def staying(columns: Iterable[npt.NDArray[Any]], stay: npt.NDArray[np.bool_]) -> Iterator[None]:
    """Put these rows (axis 0) of the columns back at the end, whatever a formula has made of
    them.
    """
    views = [column.reshape(len(stay), -1) for column in columns]
    before = [view[stay] for view in views]
    with np.errstate(invalid="ignore"):
        yield
    for view, rows in zip(views, before, strict=True):
        view[stay] = rows


class Guard:
    """A guard refuses or skips gradients that are NaN or infinite, and clips those too large.

    Owned by one table. policy: "refuse", "skip" or "apply", as in the table at the file's head.
    gradient_max: of its optimizer; larger ones are taken as that. check() and admit() raise
    BadArguments where the policy refuses.
    """

    def __init__(self, policy: str, gradient_max: float) -> None:
        self.rows_skipped = 0
        self._policy = policy
        self._gradient_max = np.float32(gradient_max)

    def check(self, whose: str, grads: Floats, keys: Keys | None = None) -> None:
        """Raise what admit() will, before other gradients are added to these."""
        if self._policy == "refuse":
            check_finite(whose, grads, keys)

    def admit(
        self, whose: str, grads: Floats, keys: Keys | None = None
    ) -> tuple[Floats, npt.NDArray[np.bool_] | None]:
        """The gradients as they are to be applied, and which rows (axis 0) are to stay as they are;
        None: none of them.
        """
        if are_ordinary(grads):
            return grads, None
        self.check(whose, grads, keys)
        stay: npt.NDArray[np.bool_] | None = None
        if self._policy == "skip":
            finite: npt.NDArray[np.bool_] = np.logical_and.reduce(
                np.isfinite(grads).reshape(len(grads), -1), axis=1
            )
            if not finite.all():
                stay = np.logical_not(finite)
                self.rows_skipped += len(finite) - int(finite.sum())
        return np.clip(grads, -self._gradient_max, self._gradient_max), stay
