"""RRef: a reference to a value of any worker, counted over processes (references.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from prpc_engine.archive import register
from prpc_engine.remote import current
from prpc_engine.remote.current import Home, ValueAddress, WorkerInfo
from prpc_engine.remote.future import Future
from prpc_engine.remote.references import ForkId

T = TypeVar("T")


class RRef(Generic[T]):
    """Refers to a value that a worker owns; the value lives as long as some RRef to it does, in
    whatever worker. It may stand anywhere in arguments and results.

    RRef(value) makes this worker the owner; remote() has another one make the value and own it.
    `type_hint` is torch's, without effect.

    address   where the value is
    created   of who has asked for the value: its owner's answer
    is_known  whether the owner has said that it knows of this RRef
    """

    __slots__ = ("__weakref__", "_fork", "_home", "address", "created", "is_known")

    def __init__(self, value: T, type_hint: Any = None) -> None:
        home = current.home()
        address, fork_id = home.own(value)
        self._fill(home, address, fork_id, None)

    @classmethod
    def made(
        cls, home: Home, address: ValueAddress, fork_id: ForkId, created: Future | None
    ) -> RRef[Any]:
        """One for that fork."""
        rref = cls.__new__(cls)
        rref._fill(home, address, fork_id, created)
        return rref

    def _fill(
        self, home: Home, address: ValueAddress, fork_id: ForkId, created: Future | None
    ) -> None:
        self.address = address
        self.created = created
        self.is_known = created is None
        self._fork = fork_id
        self._home = home

    def __repr__(self) -> str:
        return f"<RRef to {self._home.describe(self.address)}>"

    def is_owner(self) -> bool:
        """Whether the value is in this very worker."""
        return self._home.is_own(self.address)

    def owner(self) -> WorkerInfo:
        """The worker that has the value. Raises UnknownWorker where it has left or died."""
        return self._home.owner(self.address)

    def owner_name(self) -> str:
        """Its name."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has said that it knows of this RRef."""
        return self.is_known or (self.created is not None and self.created.done())

    def to_here(self, timeout: float | None = None) -> T:
        """A copy of the value, once it is there; of the owner itself, the value. `timeout` in
        seconds. Raises what making the value raised, and the errors of a call.
        """
        value: T = self._home.fetch(self, timeout)
        return value

    def local_value(self) -> T:
        """The value, in the owner itself; waits until it is made. Raises RuntimeError elsewhere."""
        if not self.is_owner():
            raise RuntimeError(
                f"{self!r} is not owned by this worker: use to_here(), which copies the value"
            )
        return self.to_here()

    def rpc_sync(self, timeout: float | None = None) -> Any:
        """The value's methods, as if it were here: each is a call of the owner, and blocks."""
        return Methods(self, self._home.call_method, timeout)

    def rpc_async(self, timeout: float | None = None) -> Any:
        """The same; each gives a Future."""
        return Methods(self, self._home.submit_method, timeout)

    def remote(self, timeout: float | None = None) -> Any:
        """The same; each gives an RRef to what it returns, which stays with the owner. Waits until
        this value is made. `timeout`, in seconds, is for making the new one: to_here() and the
        like of that raise DeadlineExceeded where it took longer.
        """
        return Methods(self, self._home.create_by_method, timeout)

    def backward(self, *_: object, **__: object) -> NoReturn:
        """Not there: distributed autograd is torch's own."""
        raise NotImplementedError(
            "RRef.backward(): distributed autograd is not part of prpc_engine.remote; send "
            "gradients as tensors, or use torch.distributed.rpc"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._home.pass_on(self),)

    def __del__(self) -> None:
        home = getattr(self, "_home", None)  # the last that is set
        if home is not None:
            home.drop_soon(self.address, self._fork)


class Methods:
    """The methods of the value of an RRef; each call of one goes to the owner."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: float | None) -> None:
        self._rref = rref
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        rref, call, timeout = self._rref, self._call, self._timeout

        def method(*args: Any, **kwargs: Any) -> Any:
            return call(rref, name, args, kwargs, timeout)

        return method


def _pack(rref: RRef[Any]) -> list[int]:
    packed: list[int] = rref.__reduce__()[1][0]
    return packed


def _unpack(fields: Any) -> RRef[Any]:
    if (
        not isinstance(fields, list)
        or len(fields) != 6
        or not all(type(one) is int for one in fields)
    ):
        raise ValueError(f"a reference of {fields!r:.100}: six whole numbers are expected")
    owner, incarnation, creator, number, parent, fork = fields
    address = ValueAddress(owner, incarnation, (creator, number))
    rref: RRef[Any] = current.home().receive(address, (parent, fork))
    return rref


register(RRef, name="prpc.remote.RRef", pack=_pack, unpack=_unpack)
