"""The way to a server whose target number is known from the start: the master, a node itself, a
task of a cluster.
"""

from __future__ import annotations


class FixedRoute:
    """A route that needs no look-up. target: the server's number at its node; text: whom errors and
    logs name.
    """

    def __init__(self, target: int, text: str) -> None:
        self.target = target
        self._text = text

    def __str__(self) -> str:
        return self._text
