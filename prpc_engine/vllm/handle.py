"""What a reader needs to find a queue and to be let in. Pickled, it goes by any way that the
program has: a pipe, a store, an argument of a process.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Handle:
    """The way to a queue. Made by MessageQueue.export_handle().

    local_reader_ranks  ranks that readers of the writer's host have
    n_reader            how many readers there are in all
    addresses           where the writer's process is reached, the best way first
    target              number of the queue there
    token               what shows that a reader was given this handle; the connection itself is
                        authenticated by the secret of the job, or of the user
    host, pid           the writer's, for texts
    """

    local_reader_ranks: list[int]
    n_reader: int
    addresses: list[str]
    target: int
    token: str = field(repr=False)
    host: str = ""
    pid: int = 0

    @property
    def remote_subscribe_addr(self) -> str | None:
        """Where readers of other hosts connect; None: the queue has none. vLLM's executors ask."""
        if self.n_reader <= len(self.local_reader_ranks):
            return None
        return next((one for one in self.addresses if one.startswith("tcp://")), None)

    def __str__(self) -> str:
        return f"the queue of process {self.pid} on {self.host}"
