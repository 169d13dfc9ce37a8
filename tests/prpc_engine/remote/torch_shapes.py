"""The shapes of calls that programs of torch.distributed.rpc are made of. Each scenario says what
it has seen, in plain values; REMOTE_OF=torch in the environment runs them by torch itself.

    python -m tests.prpc_engine.remote.torch_shapes RANK WORLD_SIZE INIT_METHOD

Rank 0 prints what the scenarios come to, as JSON; the others serve.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

OF_TORCH = os.environ.get("REMOTE_OF") == "torch"
if OF_TORCH:
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    futures: Any = importlib.import_module("torch.futures")
else:
    rpc = futures = importlib.import_module("prpc_engine.remote")
set_rpc_timeout: Any = vars(rpc)["_set_rpc_timeout"]  # torch's name
HAS_TORCH = importlib.util.find_spec("torch") is not None
torch: Any = importlib.import_module("torch") if HAS_TORCH else None
PATIENCE_S = 30.0
SHORT_S = 0.2  # of a call that is to come too late
HERE, THERE = "worker0", "worker1"
event = threading.Event()
SCENARIOS: dict[str, Callable[[], Any]] = {}
OF_TENSORS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def of_tensors(function: Callable[[], Any]) -> Callable[[], Any]:
    OF_TENSORS[function.__name__] = function
    return function


def kind(error: BaseException) -> str:
    """What a program can catch it as."""
    for one in (RuntimeError, AttributeError, KeyError, TypeError, ValueError):
        if isinstance(error, one):
            return one.__name__
    return type(error).__name__


def caught(call: Callable[[], Any]) -> Any:
    try:
        value = call()
    except Exception as error:
        return kind(error)
    return ["no error", value if isinstance(value, (int, str, list)) else type(value).__name__]


# -- what the others run ---------------------------------------------------------------------------


class Held:
    """Behind an RRef, or sent."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value

    def add(self, by: int, *, times: int = 1) -> int:
        self.value += by * times
        return int(self.value)

    def blocked(self) -> bool:
        return event.wait(PATIENCE_S)

    def fail(self) -> None:
        raise OwnError("of a method")

    @classmethod
    def of_class(cls, value: int) -> list[Any]:
        return [cls.__name__, value]

    @staticmethod
    def of_none(value: int) -> int:
        return value + 1

    @staticmethod
    @rpc.functions.async_execution
    def later(to: str, value: int) -> Any:
        return rpc.rpc_async(to, add, args=(value, 1))

    @classmethod
    @rpc.functions.async_execution
    def later_of_class(cls, to: str, value: int) -> Any:
        return rpc.rpc_async(to, add, args=(value, 2))

    @rpc.functions.async_execution
    def later_of_object(self, to: str) -> Any:
        return rpc.rpc_async(to, add, args=(self.value, 3))


class OwnError(Exception):
    """A user's."""


class NeedsTwo(Exception):
    """A user's, which cannot be made from a text."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def add(first: Any, second: Any) -> Any:
    return first + second


def same(value: Any) -> Any:
    return value


def name() -> str:
    return str(rpc.get_worker_info().name)


def blocked() -> bool:
    return event.wait(PATIENCE_S)


def let_go() -> None:
    event.set()


def begin() -> None:
    event.clear()


def fail() -> None:
    raise OwnError("told")


def fail_needing_two() -> None:
    raise NeedsTwo(1, 2)


def nested(to: str, value: int) -> int:
    return int(rpc.rpc_sync(to, add, args=(value, 1)))


def nested_back(to: str, back: str, value: int) -> int:
    return int(rpc.rpc_sync(to, nested, args=(back, value)))


def nested_async(to: str, value: int) -> int:
    first = rpc.rpc_async(to, add, args=(value, 1))
    second = rpc.rpc_async(to, add, args=(value, 2))
    return int(first.wait() + second.wait())


def nested_remote(to: str, value: int) -> int:
    return int(rpc.remote(to, add, args=(value, 1)).to_here())


def nested_rref(to: str, value: int) -> Any:
    return rpc.remote(to, add, args=(value, 1))


def nested_rrefs(to: str, value: int) -> list[Any]:
    return [rpc.remote(to, add, args=(value, by)) for by in (1, 2)]


def own_rref(value: Any) -> Any:
    return rpc.RRef(value)


def here(rref: Any) -> Any:
    return rref.to_here()


def here_of_all(rrefs: dict[str, list[Any]]) -> list[Any]:
    return [rref.to_here() for rref in rrefs["all"]]


def is_owner(rref: Any) -> list[Any]:
    return [rref.is_owner(), rref.owner().name, rref.owner_name()]


def local(rref: Any) -> Any:
    return rref.local_value()


def append(rref: Any, value: int) -> None:
    rref.local_value().append(value)


def raise_in_rref() -> Any:
    raise ValueError("while it was made")


@rpc.functions.async_execution
def later(to: str, value: int) -> Any:
    return rpc.rpc_async(to, add, args=(value, 1))


@rpc.functions.async_execution
def later_then(to: str, value: int) -> Any:
    return rpc.rpc_async(to, add, args=(value, 1)).then(lambda done: done.wait() + 10)


@rpc.functions.async_execution
def later_chained(to: str, value: int) -> Any:
    return (
        rpc.rpc_async(to, add, args=(value, 1))
        .then(lambda done: done.wait() + 10)
        .then(lambda done: done.wait() * 2)
    )


@rpc.functions.async_execution
def later_nested(to: str, back: str, value: int) -> Any:
    return rpc.rpc_async(to, later, args=(back, value))


@rpc.functions.async_execution
def later_by_hand(value: int) -> Any:
    future = futures.Future()
    threading.Thread(target=lambda: future.set_result(value + 1)).start()
    return future


@rpc.functions.async_execution
def later_failed() -> Any:
    raise OwnError("before there is a future")


@rpc.functions.async_execution
def later_fails(to: str) -> Any:
    return rpc.rpc_async(to, fail)


@rpc.functions.async_execution
def later_fails_in_then(to: str) -> Any:
    def raising(done: Any) -> Any:
        raise ValueError("in then")

    return rpc.rpc_async(to, add, args=(1, 2)).then(raising)


@rpc.functions.async_execution
def no_future() -> int:
    return 5


# -- calls -----------------------------------------------------------------------------------------


@scenario
def call_itself() -> Any:
    return [
        rpc.rpc_sync(HERE, add, args=(1, 2)),
        rpc.rpc_async(HERE, add, args=(1, 2)).wait(),
        rpc.remote(HERE, add, args=(1, 2)).to_here(),
        rpc.rpc_sync(rpc.get_worker_info(), name),
        rpc.rpc_sync(0, name),
        rpc.rpc_sync(HERE, nested, args=(HERE, 4)),
    ]


@scenario
def call_by_worker_info() -> Any:
    info = rpc.get_worker_info(THERE)
    return [rpc.rpc_sync(to, name) for to in (THERE, info, 1)]


@scenario
def call_nested() -> Any:
    return [
        rpc.rpc_sync(THERE, nested, args=(HERE, 1)),
        rpc.rpc_sync(THERE, nested_back, args=(HERE, THERE, 1)),
        rpc.rpc_sync(THERE, nested_async, args=(HERE, 1)),
        rpc.rpc_sync(THERE, nested_remote, args=(HERE, 1)),
        rpc.rpc_sync(THERE, nested_rref, args=(HERE, 1)).to_here(),
        [rref.to_here() for rref in rpc.rpc_sync(THERE, nested_rrefs, args=(HERE, 1))],
        rpc.remote(THERE, nested_rref, args=(HERE, 1)).to_here().to_here(),
    ]


@scenario
def call_methods_and_constructors() -> Any:
    return [
        rpc.rpc_sync(THERE, Held, args=(7,)).value,
        rpc.rpc_sync(THERE, Held(2).add, args=(3,), kwargs={"times": 2}),
        rpc.rpc_sync(THERE, Held.of_class, args=(1,)),
        rpc.rpc_sync(THERE, Held.of_none, args=(1,)),
        rpc.rpc_sync(THERE, Held(2).of_none, args=(1,)),
        rpc.rpc_sync(THERE, max, args=(1, 2)),
        rpc.remote(THERE, Held, kwargs={"value": 8}).to_here().value,
    ]


@scenario
def object_of_a_class_of_the_script() -> Any:
    """One whose methods use what cannot be pickled."""
    of_script = sys.modules["__main__"].Held
    return [
        caught(lambda: rpc.rpc_sync(THERE, same, args=(of_script(7),)).value),
        rpc.remote(THERE, of_script, args=(7,)).rpc_sync().get(),
    ]


@scenario
def call_many_at_once() -> Any:
    return sum(futures.wait_all([rpc.rpc_async(THERE, add, args=(n, 1)) for n in range(100)]))


@scenario
def call_what_is_no_function() -> Any:
    return [
        caught(lambda: rpc.rpc_sync("nobody", name)),
        caught(lambda: rpc.rpc_sync(THERE, lambda: 1)),
        caught(lambda: rpc.get_worker_info("nobody")),
    ]


@scenario
def worker_info() -> Any:
    info = rpc.get_worker_info(THERE)
    return [
        info.name,
        info.id,
        info == rpc.get_worker_info(THERE),
        info == rpc.get_worker_info(),
        rpc.rpc_sync(THERE, same, args=(info,)) == info,
        pickle.loads(pickle.dumps(info)) == info,
        rpc.rpc_sync(THERE, rpc.get_worker_info) == info,
    ]


# -- errors ----------------------------------------------------------------------------------------


@scenario
def errors_of_users() -> Any:
    return [
        caught(lambda: rpc.rpc_sync(THERE, fail)),
        caught(lambda: rpc.rpc_async(THERE, fail).wait()),
        caught(lambda: rpc.remote(THERE, fail).to_here()),
        caught(lambda: rpc.rpc_sync(THERE, raise_in_rref)),
        caught(lambda: rpc.remote(THERE, raise_in_rref).to_here()),
        caught(lambda: rpc.remote(THERE, Held, (1,)).rpc_sync().fail()),
        caught(lambda: rpc.remote(THERE, Held, (1,)).rpc_async().fail().wait()),
        caught(lambda: rpc.remote(THERE, Held, (1,)).remote().fail().to_here()),
        caught(lambda: rpc.remote(THERE, Held, (1,)).rpc_sync().none_such()),
        caught(lambda: rpc.rpc_sync(THERE, add, args=(1, "a"))),
        caught(lambda: rpc.rpc_sync(HERE, fail)),
        caught(lambda: rpc.rpc_sync(THERE, nested, args=("nobody", 1))),
    ]


@scenario
def error_that_cannot_be_made_from_a_text() -> Any:
    return caught(lambda: rpc.rpc_sync(THERE, fail_needing_two))


@scenario
def errors_at_each_to_here() -> Any:
    rref = rpc.remote(THERE, raise_in_rref)
    return [caught(rref.to_here) for _ in range(3)]


@scenario
def errors_of_a_callback() -> Any:
    def raising(done: Any) -> Any:
        raise ValueError("in then")

    future = rpc.rpc_async(THERE, fail)
    return [
        caught(rpc.rpc_async(THERE, add, args=(1, 2)).then(raising).wait),
        caught(future.then(lambda done: done.wait()).wait),
        caught(future.then(lambda done: 5).wait),
        caught(lambda: futures.wait_all([future, rpc.rpc_async(THERE, add, args=(1, 2))])),
    ]


# -- futures ---------------------------------------------------------------------------------------


@scenario
def futures_chained() -> Any:
    future = rpc.rpc_async(THERE, add, args=(1, 2))
    chained = future.then(lambda done: done.wait() + 1).then(lambda done: done.wait() * 10)
    given = threading.Event()
    seen: list[Any] = []

    def heard(done: Any) -> None:
        seen.append([done.done(), done.value(), done.wait()])
        given.set()

    future.add_done_callback(heard)
    given.wait(PATIENCE_S)
    return [chained.wait(), seen, future.done(), future.value(), future.wait()]


@scenario
def futures_collected() -> Any:
    parts = [rpc.rpc_async(THERE, add, args=(n, 1)) for n in range(3)]
    whole = futures.collect_all(parts)
    return [[one.wait() for one in whole.wait()], futures.wait_all(parts), futures.wait_all([])]


@scenario
def futures_by_hand() -> Any:
    future = futures.Future()
    later_value = future.then(lambda done: done.wait() + 1)
    before = [future.done(), caught(future.value)]
    future.set_result(1)
    failed = futures.Future()
    failed.set_exception(ValueError("by hand"))
    return [before, later_value.wait(), caught(failed.wait), caught(failed.value), failed.done()]


@scenario
def future_set_twice() -> Any:
    future = futures.Future()
    future.set_result(1)
    return [caught(lambda: future.set_result(2)), future.wait()]


@scenario
def asynchronous_functions() -> Any:
    return [
        rpc.rpc_sync(THERE, later, args=(HERE, 1)),
        rpc.rpc_async(THERE, later_then, args=(HERE, 1)).wait(),
        rpc.remote(THERE, later_chained, args=(HERE, 1)).to_here(),
        rpc.rpc_sync(THERE, later_nested, args=(HERE, THERE, 1)),
        rpc.rpc_sync(THERE, later_by_hand, args=(1,)),
        rpc.rpc_sync(THERE, Held.later, args=(HERE, 1)),
        rpc.rpc_sync(THERE, Held.later_of_class, args=(HERE, 1)),
        rpc.remote(THERE, Held, (1,)).rpc_sync().later(HERE, 1),
        rpc.remote(THERE, Held, (1,)).rpc_async().later_of_class(HERE, 1).wait(),
        rpc.remote(THERE, Held, (1,)).remote().later(HERE, 1).to_here(),
        rpc.remote(THERE, Held, (1,)).rpc_sync().later_of_object(HERE),
        rpc.rpc_sync(HERE, later, args=(HERE, 1)),
    ]


@scenario
def asynchronous_functions_that_fail() -> Any:
    return [
        caught(lambda: rpc.rpc_sync(THERE, later_failed)),
        caught(lambda: rpc.rpc_sync(THERE, later_fails, args=(HERE,))),
        caught(lambda: rpc.rpc_sync(THERE, later_fails_in_then, args=(HERE,))),
        caught(lambda: rpc.remote(THERE, later_failed).to_here()),
    ]


@scenario
def asynchronous_function_without_a_future() -> Any:
    return caught(lambda: rpc.rpc_sync(THERE, no_future))


# -- references ------------------------------------------------------------------------------------


@scenario
def rref_of_another() -> Any:
    rref = rpc.remote(THERE, Held, args=(5,))
    seen = [rref.to_here().value, rref.to_here().value]
    return [
        seen,
        rref.is_owner(),
        rref.owner() == rpc.get_worker_info(THERE),
        rref.owner_name(),
        rref.confirmed_by_owner(),
        caught(rref.local_value),
        rpc.rpc_sync(THERE, is_owner, args=(rref,)),
    ]


@scenario
def rref_of_itself() -> Any:
    value = Held([1])  # torch copies a list
    rref = rpc.RRef(value)
    rpc.rpc_sync(THERE, here, args=(rref,)).value.append(2)
    of_remote = rpc.remote(HERE, Held, args=(5,))
    return [
        rref.is_owner(),
        rref.confirmed_by_owner(),
        rref.owner_name(),
        rref.to_here() is value,
        rref.local_value() is value,
        value.value,
        [of_remote.to_here().value, of_remote.is_owner(), of_remote.local_value().value],
        rpc.rpc_sync(THERE, is_owner, args=(rref,)),
        caught(lambda: rpc.rpc_sync(THERE, local, args=(rref,))),
    ]


@scenario
def rref_in_arguments() -> Any:
    first, second = (rpc.remote(THERE, add, args=(n, 1)) for n in (1, 2))
    own = rpc.RRef(9)
    return [
        rpc.rpc_sync(THERE, here, args=(first,)),
        rpc.rpc_sync(THERE, here_of_all, args=({"all": [first, second, own]},)),
        rpc.remote(THERE, here, args=(own,)).to_here(),
        rpc.rpc_sync(THERE, same, args=([own],))[0].is_owner(),
        rpc.rpc_sync(THERE, own_rref, args=(4,)).to_here(),
        rpc.remote(THERE, own_rref, args=(4,)).to_here().owner_name(),
    ]


@scenario
def rref_changed_at_its_owner() -> Any:
    rref = rpc.remote(THERE, list)
    for value in (1, 2):
        rpc.rpc_sync(THERE, append, args=(rref, value))
    return rref.to_here()


@scenario
def rref_methods() -> Any:
    rref = rpc.remote(THERE, Held, args=(1,))
    return [
        rref.rpc_sync().get(),
        rref.rpc_sync().add(2, times=3),
        rref.rpc_async().add(by=1).wait(),
        rref.remote().add(1, times=2).to_here(),
        rref.remote().get().owner_name(),
        rref.to_here().value,
        rpc.RRef(Held(3)).rpc_sync().add(1),
        rpc.RRef(Held(3)).remote().get().to_here(),
    ]


@scenario
def rref_with_a_timeout() -> Any:
    rpc.rpc_sync(THERE, begin)
    rref = rpc.remote(THERE, Held, args=(1,))
    made = rpc.remote(THERE, blocked)
    seen = [
        caught(lambda: rref.rpc_sync(timeout=SHORT_S).blocked()),
        caught(lambda: rref.rpc_async(timeout=SHORT_S).blocked().wait()),
        caught(lambda: made.to_here(timeout=SHORT_S)),
    ]
    rpc.rpc_sync(THERE, let_go)
    return [*seen, made.to_here(), rref.rpc_sync(timeout=PATIENCE_S).blocked()]


@scenario
def rref_pickled_by_hand() -> Any:
    return caught(lambda: pickle.dumps(rpc.remote(THERE, add, args=(1, 2))))


# -- timeouts --------------------------------------------------------------------------------------


@scenario
def timeouts_of_calls() -> Any:
    rpc.rpc_sync(THERE, begin)
    seen = [
        caught(lambda: rpc.rpc_sync(THERE, blocked, timeout=SHORT_S)),
        caught(lambda: rpc.rpc_async(THERE, blocked, timeout=SHORT_S).wait()),
    ]
    waits = rpc.rpc_async(THERE, blocked, timeout=0)
    rpc.rpc_sync(THERE, let_go)
    return [*seen, waits.wait()]


@scenario
def timeout_by_default() -> Any:
    before = rpc.get_rpc_timeout()
    rpc.rpc_sync(THERE, begin)
    set_rpc_timeout(SHORT_S)
    try:
        seen = [
            round(rpc.get_rpc_timeout(), 3),
            caught(lambda: rpc.rpc_sync(THERE, blocked)),
            caught(lambda: rpc.rpc_async(THERE, blocked).wait()),
        ]
        waits = rpc.rpc_async(THERE, blocked, timeout=PATIENCE_S)
        set_rpc_timeout(0)
        for_ever = rpc.rpc_async(THERE, blocked)
        rpc.rpc_sync(THERE, let_go)
        return [before, *seen, waits.wait(), for_ever.wait(), rpc.get_rpc_timeout()]
    finally:
        set_rpc_timeout(before)


# -- the group -------------------------------------------------------------------------------------


@scenario
def init_rpc_twice() -> Any:
    return [caught(lambda: rpc.init_rpc(HERE, rank=0, world_size=2)), rpc.rpc_sync(THERE, name)]


@scenario
def names_of_the_module() -> Any:
    return [
        rpc.is_available(),
        isinstance(rpc.remote(THERE, add, args=(1, 2)), rpc.PyRRef),
        rpc.BackendType.TENSORPIPE.name,
        issubclass(rpc.TensorPipeRpcBackendOptions, rpc.RpcBackendOptions),
    ]


@scenario
def options_of_the_backend() -> Any:
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=3, rpc_timeout=7, init_method="tcp://127.0.0.1:1"
    )
    options.rpc_timeout = 8
    return [options.num_worker_threads, options.rpc_timeout, options.init_method]


# -- tensors ---------------------------------------------------------------------------------------


def told_of(tensor: Any) -> list[Any]:
    values = tensor.detach()
    values = values.to_dense() if values.is_sparse or values.layout is not torch.strided else values
    if values.is_quantized:
        values = values.dequantize()
    return [
        str(tensor.dtype), list(tensor.shape), str(tensor.layout),
        repr(values.resolve_conj().resolve_neg().tolist()),
    ]  # fmt: skip


def told_there(tensor: Any) -> list[Any]:
    return [*told_of(tensor), tensor.requires_grad, tensor.is_contiguous()]


def shares(first: Any, second: Any) -> bool:
    first[0] = 77
    return bool((second == 77).any())


@of_tensors
def tensors_of_all_kinds() -> Any:
    whole = torch.arange(12.0).reshape(3, 4)
    cases = {
        "transposed": whole.t(),
        "strided": whole[::2, 1::2],
        "row": whole[1],
        "zero-dim": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "expanded": torch.ones(1, 3).expand(2, 3),
        "bfloat16": torch.ones(2, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "sparse": whole.to_sparse(),
        "compressed": whole.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        "int64": torch.tensor([1 << 40]),
    }
    return {
        case: [
            caught(
                lambda tensor=tensor: rpc.rpc_sync(THERE, told_of, (tensor,)) == told_of(tensor)
            ),
            caught(
                lambda tensor=tensor: (
                    told_of(rpc.rpc_sync(THERE, same, (tensor,))) == told_of(tensor)
                )
            ),
        ]
        for case, tensor in cases.items()
    }


@of_tensors
def tensors_inside_of_values() -> Any:
    value = {"a": [torch.ones(2), (torch.zeros(3), 5)], "held": Held(torch.ones(4))}
    back = rpc.rpc_sync(THERE, same, args=(value,))
    rref = rpc.remote(THERE, torch.add, args=(torch.ones(2), 1))
    return [
        back["a"][0].tolist(),
        back["a"][1][0].tolist(),
        back["held"].value.tolist(),
        rpc.rpc_sync(THERE, torch.add, args=(torch.ones(2), torch.ones(2))).tolist(),
        rpc.rpc_sync(THERE, torch.nonzero, args=(torch.ones(2),)).tolist(),
        rref.to_here().tolist(),
        rref.rpc_sync().sum().item(),
        rpc.rpc_sync(HERE, torch.add, args=(torch.ones(2), 1)).tolist(),
    ]


@of_tensors
def tensors_that_share_memory() -> Any:
    whole = torch.zeros(4)
    return [
        rpc.rpc_sync(THERE, shares, args=(whole, whole)),
        rpc.rpc_sync(THERE, shares, args=(whole[:2], whole)),
        whole.tolist(),
    ]


@of_tensors
def tensors_that_require_a_gradient() -> Any:
    leaf = torch.ones(2, requires_grad=True)
    return [
        rpc.rpc_sync(THERE, told_there, args=(leaf,))[-2],
        rpc.rpc_sync(THERE, told_there, args=(leaf.detach(),))[-2],
        rpc.rpc_sync(THERE, same, args=(leaf,)).requires_grad,
        rpc.rpc_sync(THERE, told_there, args=(torch.nn.Parameter(torch.ones(1)),))[-2],
    ]


@of_tensors
def tensors_of_a_result_of_a_graph() -> Any:
    return caught(
        lambda: rpc.rpc_sync(THERE, told_of, args=(torch.ones(2, requires_grad=True) * 2,))[1]
    )


@of_tensors
def module_behind_an_rref() -> Any:
    rref = rpc.remote(THERE, torch.nn.Linear, args=(2, 1))
    copy = rref.to_here()
    given = torch.ones(1, 2)
    return [
        torch.equal(rref.rpc_sync().forward(given), copy(given)),
        len(rref.rpc_sync().state_dict()),
        sorted(rref.rpc_sync().state_dict()),
    ]


@of_tensors
def function_of_torch_script() -> Any:

    scripted = torch.jit.script(torch.nn.functional.relu)
    return caught(lambda: rpc.rpc_sync(THERE, scripted, args=(torch.ones(1),)).tolist())


def main() -> None:
    rank, size, init_method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    pending = None
    if rank == 0:
        seen = {}
        for key, run in {**SCENARIOS, **(OF_TENSORS if HAS_TORCH else {})}.items():
            print(key, file=sys.stderr, flush=True)
            seen[key] = caught_whole(run)
        rpc.rpc_sync(THERE, begin)
        pending = rpc.rpc_async(THERE, blocked)
        rpc.rpc_async(THERE, let_go)
    rpc.shutdown()
    if pending is not None:
        seen["pending_at_shutdown"] = pending.wait()
        seen["call_after_shutdown"] = caught(lambda: rpc.rpc_sync(THERE, name))
        seen["shutdown_again"] = caught(rpc.shutdown)
        print(json.dumps(seen), flush=True)


def caught_whole(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return f"the scenario itself: {type(error).__name__}: {str(error)[:300]}"


if __name__ == "__main__":
    # under its own name: what is of a script travels otherwise
    importlib.import_module("tests.prpc_engine.remote.torch_shapes").main()
