"""The key-value store of torchrun's agent: where the workers of env:// find the group's master, as
the store itself has MASTER_PORT. torch's client of it is used; no other file here imports torch.

    key      written by           meaning
    asked    all but rank 0       how many questions there were, since torchrun began
    <n>      rank 0               the answer to the nth of them: the address of its group's master

A worker waits for the answer to its own question, and a rank 0 answers while it is in init_rpc().
So no worker is told the address of a group that is over: of workers that torchrun has restarted, or
of a group that this process has left. Restart counts would not do: those of agents of several hosts
differ.
"""

from __future__ import annotations

import datetime
import importlib
import logging
import socket
from typing import Any

from prpc_engine import errors
from prpc_engine.settings.address import Address
from shard import runtime

logger = logging.getLogger("prpc")
PREFIX = "prpc.remote"
LOOK_S = 0.05  # between two looks, for the answer, or for the store itself
CONNECT_S = 1.0  # for one try to reach it


class AgentStore:
    """This worker's connection to the store. Owned by a Worker; it ends with that object.

    address     of the store
    give_up_at  when to stop trying to reach it, of the monotonic clock

    Raises ConfigError where torch cannot be imported, MasterUnreachable.
    """

    def __init__(self, address: Address, give_up_at: float) -> None:
        self._named = f"torchrun's store at {address}"
        try:
            distributed: Any = importlib.import_module("torch.distributed")
        except ImportError as error:
            raise errors.ConfigError(
                f"init_method env:// under torchrun asks {self._named} where rank 0 is, and needs "
                'torch for that; or pass another init_method, such as "tcp://127.0.0.1:29501", to '
                "all workers"
            ) from error
        self._answered = 0  # questions, by this worker as rank 0
        self._reach(address, give_up_at)
        try:
            store = distributed.TCPStore(
                address.host.strip("[]"), address.port, is_master=False, timeout=_left(give_up_at)
            )
            self._store = distributed.PrefixStore(PREFIX, store)
        except RuntimeError as error:
            raise self._unreachable(error) from error

    def _reach(self, address: Address, give_up_at: float) -> None:
        """Wait until somebody listens there, as torch's client would without a word and without
        hearing of Ctrl-C. Raises MasterUnreachable.
        """
        is_told = False
        while True:
            left_s = give_up_at - runtime.monotonic()
            try:
                socket.create_connection(
                    (address.host.strip("[]"), address.port), max(0.001, min(CONNECT_S, left_s))
                ).close()
            except OSError as error:
                if left_s <= 0:
                    raise self._unreachable(error) from error
                if not is_told:
                    is_told = True
                    logger.warning(
                        "waiting for %s, for up to %.3g s: %s", self._named, left_s, str(error)
                    )
                runtime.sleep(LOOK_S)
            else:
                return

    def ask(self, give_up_at: float) -> str:
        """The address of the group's master, once rank 0 answers. Raises MasterUnreachable."""
        try:
            question = str(self._store.add("asked", 1))
            # not its wait(), which logs a warning each time that it looks in vain
            while not self._store.check([question]):
                if runtime.monotonic() >= give_up_at:
                    break
                runtime.sleep(LOOK_S)
            else:
                answer: bytes = self._store.get(question)
                return str(Address.parse(answer.decode()))
        except RuntimeError as error:
            raise self._unreachable(error) from error
        raise errors.MasterUnreachable(
            f"rank 0 has not told {self._named} where the group's master is: it does once it has "
            "called init_rpc(), with env:// as well"
        )

    def answer(self, address: str) -> None:
        """As rank 0, whose master is at that address: answer what has been asked since the last
        time. Raises MasterUnreachable.
        """
        try:
            asked = self._store.add("asked", 0)
            while self._answered < asked:
                self._store.set(str(self._answered + 1), address)
                self._answered += 1
        except RuntimeError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> errors.MasterUnreachable:
        text = str(error).partition("\n")[0]
        return errors.MasterUnreachable(
            f"{self._named}, which says where rank 0 is, does not answer: {text:.300}"
        )


def _left(give_up_at: float) -> datetime.timedelta:
    # 0 would mean "for ever"
    return datetime.timedelta(seconds=max(0.001, give_up_at - runtime.monotonic()))
