"""Topics whose publisher and readers start at once.

what              promise                                    how it is checked
readers           each is a reader within READY_S, whoever   the publisher waits for both
                  is first
items             each reader gets all, in order, and has    what each received
                  missed none
"""

from __future__ import annotations

from prpc_engine import RpcService, topics
from prpc_engine.simulation import Process, Simulation
from shard import runtime
from tests.simulation.jobs import begin, begin_master, run_to_the_end

ITEMS, READERS = 5, 2
READY_S, RECEIVE_S, END_S = 20.0, 30.0, 60.0


def starts_at_once(simulation: Simulation) -> None:
    """No fault: only the order of the first steps differs."""
    received: dict[str, list[tuple[int, int]]] = {}

    def publish(ours: RpcService, process: Process) -> None:
        with topics.Publisher(ours, "numbers", capacity=ITEMS) as publisher:
            publisher.wait_for_readers(READERS, timeout_s=READY_S)
            for number in range(ITEMS):
                publisher.publish(number)
            while len(received) < READERS:  # what has not been read goes with its publisher
                runtime.sleep(0.1)

    def read(ours: RpcService, process: Process) -> None:
        with topics.Subscriber(ours, "numbers") as reader:
            items = [reader.receive(timeout_s=RECEIVE_S) for _ in range(ITEMS)]
            received[process.name] = [(item.value, item.skipped) for item in items]

    begin_master(simulation)
    processes = [begin(simulation, "publisher", publish)]
    processes += [begin(simulation, f"reader{number}", read) for number in range(READERS)]
    run_to_the_end(simulation, processes, END_S)
    for name, items in received.items():
        assert items == [(number, 0) for number in range(ITEMS)], f"{name} received {items}"
