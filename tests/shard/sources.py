"""Something for a reactor to poll, as a ring would be."""

from __future__ import annotations


class Source:
    """Something to poll, as a ring would be."""

    def __init__(self) -> None:
        self.work = 0
        self.slept: list[bool] = []

    def poll(self) -> int:
        done, self.work = self.work, 0
        return done

    def prepare_sleep(self, sleeping: bool) -> float:
        self.slept.append(sleeping)
        return 1.0

    def has_work(self) -> bool:
        return self.work > 0


class Endless(Source):
    """A ring that never runs empty: a full batch at every look."""

    polls = 0

    def poll(self) -> int:
        self.polls += 1
        return 64
