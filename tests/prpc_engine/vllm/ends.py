"""Ends of queues in processes of their own: told what to do line by line, killed.

    python -m tests.prpc_engine.vllm.ends

does what the lines of its standard input say: a JSON list [method, keywords] each, answered by a
JSON line, {"value": ...} or {"error": [type, text, more]}. The end of the input, which the death of
the test brings about too, ends it.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.vllm import Handle, MessageQueue
from tests.program import Program

ITEMS = 20_000  # of a small array: 80 KB, which is lent


class EndProcess(Program):
    """One such process."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        super().__init__("tests.prpc_engine.vllm.ends", env=env)

    def begin(self, method: str, **keywords: Any) -> None:
        """Tell it to do something; answer() waits for it."""
        self.write_line(json.dumps([method, keywords]))

    def answer(self) -> Any:
        """What came of it; an error as [type, text]."""
        content = json.loads(self.read_line())
        return content.get("value", content.get("error"))

    def do(self, method: str, **keywords: Any) -> Any:
        """Both."""
        self.begin(method, **keywords)
        return self.answer()

    def make(self, *arguments: Any, **more: Any) -> Handle:
        """Have it be a writer."""
        return of_text(self.do("make", arguments=arguments, more=more))

    def join(self, handle: Handle, rank: int) -> Any:
        """Have it be a reader."""
        return self.do("join", handle=text_of(handle), rank=rank)


def text_of(handle: Handle) -> str:
    """A handle, for a line."""
    return base64.b64encode(pickle.dumps(handle)).decode()


def of_text(text: str) -> Handle:
    """The handle."""
    handle = pickle.loads(base64.b64decode(text))
    assert isinstance(handle, Handle)
    return handle


def array_of(number: int, items: int = ITEMS) -> NDArray[np.float32]:
    """An item: each element is its number."""
    return np.full(items, number, np.float32)


def number_in(value: Any) -> int:
    """Of such an item; -1 where it is torn."""
    if isinstance(value, np.ndarray):
        return int(value[0]) if (value == value[0]).all() else -1
    return int(value)


class End:
    """What the process has, and does."""

    def __init__(self) -> None:
        self.queue: MessageQueue | None = None

    def do(self, method: str, **keywords: Any) -> Any:
        """One line."""
        if method == "make":
            self.queue = MessageQueue(*keywords["arguments"], **keywords["more"])
            return text_of(self.queue.export_handle())
        if method == "join":
            self.queue = MessageQueue.create_from_handle(
                of_text(keywords["handle"]), keywords["rank"]
            )
            return None
        queue = self.queue
        assert queue is not None, "make or join comes first"
        if method == "numbers":  # of so many items
            return [number_in(queue.dequeue(timeout=30.0)) for _ in range(keywords["count"])]
        if method == "echo":  # say each number as it comes
            while True:
                print(json.dumps({"value": number_in(queue.dequeue())}), flush=True)
        if method == "arrays":
            for number in range(keywords["first"], keywords["end"]):
                queue.enqueue(array_of(number, keywords.get("items", ITEMS)))
            return None
        if method == "pour":  # without end
            number = 0
            while True:
                queue.enqueue(array_of(number))
                number += 1
        if method == "statistics":
            return asdict(queue.statistics())
        if method == "drop":
            self.queue = queue = None
            return None
        return getattr(queue, method)(**keywords)


def main() -> None:
    """What the process runs."""
    end = End()
    for line in sys.stdin:
        method, keywords = json.loads(line)
        try:
            answer: dict[str, Any] = {"value": end.do(method, **keywords)}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error)]}
        print(json.dumps(answer), flush=True)
    if end.queue is not None:
        end.queue.shutdown()


if __name__ == "__main__":
    main()
