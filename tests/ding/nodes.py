"""Nodes of a DI-engine job in processes of their own, without DI-engine: told what to do line by
line, killed.

    python -m tests.ding.nodes ARGUMENTS

makes a PrpcMQ of these arguments (JSON), listens, and does what the lines of its standard input
say: a JSON list [method, keywords] each, answered by a JSON line, {"value": ...} or {"error":
[type, text]}. The end of the input, which the death of the test brings about too, stops it.
"""

from __future__ import annotations

import json
import sys
import threading
import zlib
from dataclasses import asdict
from typing import Any

from prpc_engine.ding import PrpcMQ
from tests.program import Program


class NodeProcess(Program):
    """One such process."""

    def __init__(self, env: dict[str, str] | None = None, **arguments: Any) -> None:
        super().__init__("tests.ding.nodes", json.dumps(arguments), env=env)

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


def data_of(number: int, size: int = 8) -> bytes:
    """The data of an event: its number, and so many bytes that follow from it."""
    return (b"%d:" % number).ljust(size, bytes([number % 251]))


def number_in(data: bytes | memoryview) -> int:
    """The number of such an event."""
    return int(bytes(data[:20]).partition(b":")[0])


def main(arguments: str) -> None:
    """What the process runs."""
    mq = PrpcMQ(**json.loads(arguments))
    mq.listen()
    try:
        for line in sys.stdin:
            method, keywords = json.loads(line)
            try:
                answer = {"value": _do(mq, method, **keywords)}
            except Exception as error:
                answer = {"error": [type(error).__name__, str(error)]}
            print(json.dumps(answer), flush=True)
    finally:
        mq.stop()


def _do(mq: PrpcMQ, method: str, **keywords: Any) -> Any:
    if method == "publish":
        for number in range(keywords.get("first", 0), keywords.get("end", 1)):
            mq.publish(keywords["topic"], data_of(number, keywords.get("size", 8)))
        return None
    if method == "publish_from_threads":
        threads = [
            threading.Thread(target=_do, args=(mq, "publish"), kwargs={**keywords, "topic": name})
            for name in keywords.pop("topics")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return None
    if method == "recv":  # so many events, as topic, number, size and checksum
        found = []
        for _ in range(keywords["count"]):
            event = mq.recv()
            assert event is not None, "nobody stops it"
            found.append((event[0], number_in(event[1]), len(event[1]), zlib.crc32(event[1])))
        return found
    if method == "statistics":
        return asdict(mq.statistics())
    return getattr(mq, method)(**keywords)


if __name__ == "__main__":
    main(*sys.argv[1:])
