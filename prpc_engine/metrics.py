"""What an RpcService, or a task of a cluster, does, as Prometheus metrics: read when they are
scraped, so that calls pay nothing.

    family                        kind       labels              family says
    prpc_peer_...                 see PEER   peer, transport     one connection to another node: our
                                                                 calls, bytes
    prpc_transport_...            TRANSPORT  transport           all connections over it, those that
                                                                 are over too
    prpc_server_...               SERVER     service, server_id  one server made here: requests,
                                                                 failures, load
    prpc_server_refused_total     counter    + reason            requests refused before a handler
                                                                 ran
    prpc_server_handler_seconds   histogram  + method            with RpcService(timing=True)
    prpc_server_slow_calls_total  counter    + method            with RpcService(slow_call_s=...)
    prpc_service_...              SERVER     service             the counters of all servers of a
                                                                 service made here
    prpc_service_refused_total    counter    + reason            the same
    prpc_client_...               CLIENT     service, client     one client made here: its choices,
                                                                 its retries
    prpc_client_errors_total      counter    + error             calls that ended so
    prpc_client_call_seconds      histogram                      one answered call in 256
    prpc_client_servers           gauge      + state             its servers: well, suspect,
                                                                 ejected, probing
    prpc_slab_...                 SLAB                           shared memory of one process
    prpc_shard_...                SHARD      shard               one process of RpcService(shards=N)
    prpc_class_...                CLASS      class               one class of work in one process:
                                                                 what it ran, what of it waits
    prpc_node_rank                gauge                          which node of the job this is
    prpc_task_...                 TASK       task                a cluster's Server: the tensors of
                                                                 all its processes

A cluster's Server has no prpc_service_, prpc_client_ and prpc_node_ families; its shards are those
that answer for it (relay.py).

Each shard has peers, servers (sharded=True), a slab and classes of its own: families of these have
the label `shard`, which is empty for the service's own process. Shards are asked at each
scrape. One that does not answer in time (shard_figures.TIMEOUT_S) has prpc_shard_up 0 and the
values of its process only, and counts in prpc_service_... and in prpc_transport_... with what it
said last: so these fall neither while it is busy, nor when it dies or is started again. What a
shard did between its last answer to a scrape and its death is in none of them.

    metrics.register(service)           # or a Server, into prometheus_client's registry of the
                                        process, or your own
    with metrics.serve(service, 9400):  # http://127.0.0.1:9400/metrics, with cpu and memory of the
                                        process

Connections of one peer over one transport are added up. A connection that was made anew counts from
zero, which Prometheus takes for the restart that it is; prpc_transport_... go on with what all
connections did, and are true to the last byte of a process that lives.

Needs prometheus_client: pip install 'prpc-engine[metrics]'.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prpc_engine import errors
from prpc_engine.client.client import ClientStatistics
from prpc_engine.cluster.names import device
from prpc_engine.cluster.server import Server, State
from prpc_engine.rpc.server import ServedStatistics
from prpc_engine.rpc.timing import MethodTiming
from prpc_engine.service.service import RpcService
from prpc_engine.service.shard_statistics import NodeFigures, ShardFigures, all_ended
from prpc_engine.settings.cluster_spec import Task
from prpc_engine.settings.config import check_number

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import HistogramMetricFamily, Metric

    Samples = Iterable[tuple[tuple[str, ...], float]]  # label values, value

_log = logging.getLogger("prpc")
# for a scraper to send its request, and to read: Prometheus itself gives a scrape up after 10 s by
# default, and who neither asks nor leaves would hold a thread for ever
REQUEST_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0  # for the server's thread, which looks twice a second whether it shall end


class Figure(NamedTuple):
    """One family, and where its value stands in the statistics of what it is about."""

    name: str
    kind: str  # "counter", "gauge"
    text: str
    read: Callable[[Any], float]


PEER_LABELS = ("peer", "transport", "shard")
PEER = (
    Figure("requests", "counter", "Requests made by this process.", attrgetter("requests")),
    Figure(
        "in_flight",
        "gauge",
        "Requests of this process that wait for their reply.",
        attrgetter("in_flight"),
    ),
    Figure(
        "late_replies",
        "counter",
        "Replies dropped because their call had ended before.",
        attrgetter("replies_dropped"),
    ),
    Figure(
        "outbox_messages",
        "gauge",
        "Messages that wait for the peer to read.",
        attrgetter("outbox_messages"),
    ),
    Figure(
        "sent_bytes",
        "counter",
        "Bytes sent, arrays lent in place included.",
        attrgetter("traffic.bytes_sent"),
    ),
    Figure(
        "received_bytes",
        "counter",
        "Bytes received, arrays borrowed included.",
        attrgetter("traffic.bytes_received"),
    ),
    Figure(
        "ring_full",
        "counter",
        "Records that found their ring full.",
        attrgetter("traffic.full_waits"),
    ),
    Figure(
        "arrays_spilled",
        "counter",
        "Arrays that found no room in shared memory.",
        attrgetter("traffic.arrays_spilled"),
    ),
)
TRANSPORT_LABELS = ("transport", "shard")
TRANSPORT = tuple(figure for figure in PEER if figure.kind == "counter")
SERVER_LABELS = ("service", "server_id", "shard")
SERVER = (
    Figure(
        "requests",
        "counter",
        "Requests and notifications whose handler ran or is queued.",
        attrgetter("requests"),
    ),
    Figure("failures", "counter", "Handlers that raised.", attrgetter("failures")),
    Figure(
        "expired",
        "counter",
        "Requests whose deadline passed before their handler could run.",
        attrgetter("expired"),
    ),
    Figure("cancelled", "counter", "Requests given up by their callers.", attrgetter("cancelled")),
    Figure(
        "repeated",
        "counter",
        "Calls of once methods that came again, and were not run again.",
        attrgetter("repeated"),
    ),
    Figure(
        "forgotten",
        "counter",
        "Answers to calls of once methods that are kept no longer.",
        attrgetter("forgotten"),
    ),
    Figure("tasks", "gauge", "Handlers that run as tasks now.", attrgetter("tasks")),
    Figure("queued", "gauge", "Requests that wait for a task to end.", attrgetter("queued")),
)
CLIENT_LABELS = ("service", "client")
CLIENT = (
    Figure("calls", "counter", "Calls and streams that were begun.", attrgetter("calls")),
    Figure(
        "timeouts",
        "counter",
        "Of those, how many ended because their deadline passed.",
        attrgetter("timeouts"),
    ),
    Figure(
        "ejections",
        "counter",
        "Servers taken out because calls of them failed.",
        attrgetter("ejections"),
    ),
    Figure(
        "spared",
        "counter",
        "Failures that would have ejected, had not too many been ejected.",
        attrgetter("spared"),
    ),
    Figure("probes", "counter", "Calls that tried an ejected server again.", attrgetter("probes")),
    Figure(
        "last_resorts",
        "counter",
        "Calls given to an ejected server because no other was left.",
        attrgetter("last_resorts"),
    ),
    Figure(
        "waiting",
        "gauge",
        "Calls that wait for a connection or for another attempt.",
        attrgetter("waiting"),
    ),
    Figure(
        "retries",
        "counter",
        "Attempts after one that may have reached a server.",
        attrgetter("retries"),
    ),
    Figure(
        "retries_refused",
        "counter",
        "Attempts not made, as the budget for them was spent.",
        attrgetter("retries_refused"),
    ),
    Figure(
        "hedges",
        "counter",
        "Calls also sent to a second server, as the first was slow.",
        attrgetter("hedges"),
    ),
    Figure(
        "hedges_won",
        "counter",
        "Of those, how many the second server answered first.",
        attrgetter("hedges_won"),
    ),
    Figure(
        "hedges_refused",
        "counter",
        "Hedges not sent, as the budget for them was spent.",
        attrgetter("hedges_refused"),
    ),
)
SLAB = (
    Figure(
        "reserved_bytes",
        "gauge",
        "Shared memory taken from the system.",
        attrgetter("reserved_bytes"),
    ),
    Figure(
        "reserved_bytes_high_water",
        "gauge",
        "The most of that there ever was.",
        attrgetter("reserved_bytes_max"),
    ),
    Figure(
        "used_bytes",
        "gauge",
        "In blocks that an array here or a peer uses.",
        attrgetter("used_bytes"),
    ),
    Figure(
        "used_bytes_high_water",
        "gauge",
        "The most of that there ever was.",
        attrgetter("used_bytes_max"),
    ),
    Figure("limit_bytes", "gauge", "The bound of reserved_bytes.", attrgetter("limit_bytes")),
    Figure(
        "fragmentation_ratio",
        "gauge",
        "Share of reserved_bytes that holds nothing.",
        attrgetter("fragmentation"),
    ),
    Figure(
        "leases",
        "gauge",
        "Blocks that peers hold, counted once for each peer.",
        attrgetter("leases"),
    ),
    Figure("leased_bytes", "gauge", "In blocks that peers hold.", attrgetter("leased_bytes")),
    Figure(
        "oldest_lease_seconds",
        "gauge",
        "Age of the oldest lease: one that only grows is kept forever.",
        attrgetter("lease_age_s_max"),
    ),
)
SHARD = (
    Figure(
        "up",
        "gauge",
        "Whether it answered when it was asked for the other values: 1, else 0.",
        lambda one: one.now is not None,
    ),
    Figure("starts", "counter", "Times it was started.", attrgetter("process.incarnation")),
    Figure(
        "busy_ratio",
        "gauge",
        "Share of its time in which it had work.",
        attrgetter("process.counters.busy_ratio"),
    ),
    Figure("turns", "counter", "Of its reactor.", attrgetter("process.counters.turns")),
    Figure("parks", "counter", "Times it slept.", attrgetter("process.counters.parks")),
    Figure(
        "stalls",
        "counter",
        "Handlers that ran over their budget.",
        attrgetter("process.counters.stalls"),
    ),
    Figure(
        "calls",
        "counter",
        "Functions it ran for the other processes here.",
        attrgetter("process.counters.calls"),
    ),
    Figure(
        "failures", "counter", "Of those, how many raised.", attrgetter("process.counters.failures")
    ),
    Figure(
        "read_bytes",
        "counter",
        "From the other processes here.",
        attrgetter("process.counters.bytes_in"),
    ),
    Figure(
        "written_bytes",
        "counter",
        "To the other processes here.",
        attrgetter("process.counters.bytes_out"),
    ),
)
CLASS = (
    Figure("steps", "counter", "Steps that ended.", attrgetter("steps")),
    Figure("seconds", "counter", "What they took.", lambda one: one.busy_ns * 1e-9),
    Figure(
        "longest_step_seconds",
        "gauge",
        "The longest of them, and of the class latency the longest turn.",
        lambda one: one.longest_ns * 1e-9,
    ),
    Figure("waiting", "gauge", "Steps that wait to run.", attrgetter("waiting")),
)
TASK = (
    Figure("requests", "counter", "Requests for tensors that left here.", attrgetter("messages")),
    Figure("tensors", "counter", "Tensors that were asked for by them.", attrgetter("tensors")),
    Figure(
        "fused",
        "counter",
        "Of those, how many left with others in one request.",
        attrgetter("fused"),
    ),
    Figure(
        "answers",
        "counter",
        "Requests of other tasks that were answered here, by shards too.",
        attrgetter("answers"),
    ),
    Figure("waiting", "gauge", "Tensors and requests that wait here.", attrgetter("waiting")),
    Figure("waiting_bytes", "gauge", "In those tensors.", attrgetter("waiting_bytes")),
    Figure("steps", "gauge", "Steps that are remembered.", attrgetter("steps")),
)
# of a server, seen by a client's balancer; others are "well"
STATES = ("suspect", "ejected", "probing")
# Of the 64 buckets of a MethodTiming: 1 us to 69 s, which is where handlers are; what is longer is
# in +Inf.
BUCKET_FIRST, BUCKET_LAST = 10, 36


class Collector:
    """Reads one service or task whenever its registry is asked. One that is closed has no metrics
    any more.
    """

    def __init__(self, source: RpcService | Server) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        """Names and kinds, without values: registries refuse what would give two meanings to a
        name.
        """
        return _of_service(None) if isinstance(self._source, RpcService) else _of_task(None)

    def collect(self) -> Iterable[Metric]:
        """The values of now; waits for shards for shard_figures.TIMEOUT_S at most."""
        source = self._source
        try:
            return list(_of_service(source) if isinstance(source, RpcService) else _of_task(source))
        except errors.Closed:
            return ()


def register(source: RpcService | Server, registry: CollectorRegistry | None = None) -> Collector:
    """Let a registry, that of the process by default, read the service or task;
    `registry.unregister()` takes what this returns.

    Raises ConfigError when prometheus_client is not installed, the registry reads one already, or
    `source` is neither; Closed for one that is closed.
    """
    _check_source(source)
    client = _prometheus_client()
    collector = Collector(source)
    try:
        (client.REGISTRY if registry is None else registry).register(collector)
    except ValueError as error:
        raise errors.ConfigError(
            "this registry reads a service or task already: give each a registry of its own, "
            f"or unregister the other ({error})"
        ) from error
    return collector


def _check_source(source: object) -> None:
    """Refuse what would only fail at a scrape, or show nothing there. A task that was not started
    yet has its metrics once it is. Raises ConfigError, Closed.
    """
    if not isinstance(source, RpcService | Server):
        raise errors.ConfigError(
            f"metrics of {source!r:.100}: an RpcService or a Server of a cluster is allowed"
        )
    if source.closed if isinstance(source, RpcService) else source.state is State.STOPPED:
        raise errors.Closed(
            f"metrics of this {type(source).__name__}, which was closed here: "
            "an open one is allowed"
        )


class _ScrapeHandler(WSGIRequestHandler):
    """One connection of a scraper: a thread of its own, which ends with it."""

    timeout = REQUEST_TIMEOUT_S

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError) as error:  # else a traceback of 20 lines on stderr
            _log.debug("a scraper at %s got no metrics: %r", self.client_address[0], error)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for each scrape would be the whole of a log."""


class MetricsServer:
    """Answers GET /metrics. Made by serve(); close() ends it. A context manager."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.host = str(server.server_address[0])
        self.port = server.server_port

    def close(self) -> None:
        """Answer no more. Again: does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def serve(
    source: RpcService | Server, port: int, host: str = "127.0.0.1", expose: bool = False
) -> MetricsServer:
    """Serve the metrics of a service or task and of its process over http, from a thread of its
    own; port 0 takes any free one.

    They name services, methods and peers, and whoever can connect may read them: there is no
    secret. So only this host's own addresses are allowed, unless `expose` says that the network is
    trusted. Raises ConfigError, AddressInUse, and Closed as register() does.
    """
    check_number("port", port, 0, 65535)
    if not expose and not _is_loopback(host):
        raise errors.ConfigError(
            f"refusing to serve metrics at {host}, which other hosts may reach, "
            "as anybody there could read them: listen at "
            "127.0.0.1, or pass expose=True where that network is trusted"
        )
    client = _prometheus_client()
    registry = client.CollectorRegistry()
    register(source, registry)
    client.ProcessCollector(registry=registry)
    try:
        server, thread = client.start_http_server(port, host, registry)
    except OSError as error:
        text = f"cannot serve metrics at {host}:{port}: {error}"
        if error.errno == errno.EADDRINUSE:
            raise errors.AddressInUse(f"{text}; port=0 takes any free one") from error
        raise errors.ConfigError(f"{text}; an address of this host is allowed") from error
    # It listens already: a connection that was quicker than this has the library's handler, which
    # answers alike.
    server.RequestHandlerClass = _ScrapeHandler
    return MetricsServer(server, thread)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: who knows where it leads
        return False


def _prometheus_client() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise errors.ConfigError(
            "metrics need prometheus_client: pip install 'prpc-engine[metrics]'"
        ) from error
    return prometheus_client


# -- from statistics to families -------------------------------------------------------------------


def _of_service(service: RpcService | None) -> Iterator[Metric]:
    """All families of one; None gives none a value. Raises Closed."""
    shards = [] if service is None else service.figures_of_shards()
    now = None if service is None else service.statistics()
    yield from _of_processes(now, shards)
    nodes: list[NodeFigures] = [] if now is None else [now]
    nodes += [one.last for one in shards if one.last is not None]
    kept = [node.servers for node in nodes] + [one.past.servers for one in shards]
    services = [(_parts(key)[:1], one) for servers in kept for key, one in servers.items()]
    counters = [figure for figure in SERVER if figure.kind == "counter"]
    yield from _read("service", counters, SERVER_LABELS[:1], services)
    yield _refused("service", SERVER_LABELS[:1], services)
    clients = [] if now is None else [(_parts(key), one) for key, one in now.clients.items()]
    yield from _read("client", CLIENT, CLIENT_LABELS, clients)
    yield _family(
        "client_errors",
        "counter",
        "Calls, streams and notifications that ended with an error.",
        (*CLIENT_LABELS, "error"),
        (((*labels, name), count) for labels, one in clients for name, count in one.errors.items()),
    )
    latencies = [(labels, one.latency) for labels, one in clients if one.latency.calls]
    yield _seconds(
        "client_call_seconds",
        "How long calls took until their answers were here, one in 256.",
        CLIENT_LABELS,
        latencies,
    )
    yield _family(
        "client_servers",
        "gauge",
        "Servers that a client knows, by what its balancer thinks of them.",
        (*CLIENT_LABELS, "state"),
        (
            ((*labels, state), count)
            for labels, one in clients
            for state, count in _states(one).items()
        ),
    )
    yield _family(
        "node_rank",
        "gauge",
        "This node's number in its job.",
        (),
        [] if now is None else [((), now.rank)],
    )


def _of_task(server: Server | None) -> Iterator[Metric]:
    """All families of one; None gives none a value. Raises Closed."""
    if server is None:
        yield from _of_processes(None, ())
        yield from _read("task", TASK, ("task",), ())
        return
    yield from _of_processes(server.figures(), server.figures_of_shards())
    name = device(Task(server.server_def.job_name, server.server_def.task_index))
    yield from _read("task", TASK, ("task",), [((name,), server.statistics())])


def _of_processes(here: NodeFigures | None, shards: Iterable[ShardFigures]) -> Iterator[Metric]:
    """What this process and its shards have alike."""
    by_shard = [((str(one.process.index),), one) for one in shards]
    answered: list[tuple[str, NodeFigures]] = [] if here is None else [("", here)]
    answered += [(index, one.now) for (index,), one in by_shard if one.now is not None]
    peers = [
        ((one.peer, one.transport, shard), one) for shard, node in answered for one in node.peers
    ]
    servers = [
        ((*_parts(key), shard), one)
        for shard, node in answered
        for key, one in node.servers.items()
    ]
    yield from _read("peer", PEER, PEER_LABELS, peers)
    ended = [
        ((transport, shard), one)
        for shard, node in answered
        for transport, one in node.ended.items()
    ]
    living = [((one.transport, shard), one) for shard, node in answered for one in node.peers]
    for (index,), one in by_shard:
        over = one.past.ended
        if one.now is None and one.last is not None:
            # busy: its connections are there
            if one.process.alive and one.last.pid == one.process.pid:
                living += [((peer.transport, index), peer) for peer in one.last.peers]
                over = all_ended(replace(one.last, peers=()), over)
            else:
                over = all_ended(one.last, over)
        ended += [((transport, index), each) for transport, each in over.items()]
    yield from _read("transport", TRANSPORT, TRANSPORT_LABELS, [*living, *ended])
    yield _family(
        "transport_connections_ended",
        "counter",
        "Connections that are over.",
        TRANSPORT_LABELS,
        ((labels, one.connections) for labels, one in ended),
    )
    yield from _read("server", SERVER, SERVER_LABELS, servers)
    yield _refused("server", SERVER_LABELS, servers)
    # A method has its 30 series from its first call on: a server has many methods, and most of them
    # are hardly called.
    timings = [
        ((*labels, method), timing)
        for labels, one in servers
        for method, timing in one.timings.items()
        if timing.calls
    ]
    text = "How long handlers took, those of tasks with their waits."
    yield _seconds("server_handler_seconds", text, (*SERVER_LABELS, "method"), timings)
    yield _family(
        "server_slow_calls",
        "counter",
        "Handlers that took slow_call_s or more.",
        (*SERVER_LABELS, "method"),
        ((labels, timing.slow) for labels, timing in timings),
    )
    yield from _read("slab", SLAB, ("shard",), [((shard,), node.slab) for shard, node in answered])
    yield from _read("shard", SHARD, ("shard",), by_shard)
    classes = [((one.name, shard), one) for shard, node in answered for one in node.classes]
    yield from _read("class", CLASS, ("class", "shard"), classes)


def _read(
    what: str,
    figures: Iterable[Figure],
    names: tuple[str, ...],
    about: Iterable[tuple[tuple[str, ...], Any]],
) -> Iterator[Metric]:
    for figure in figures:
        samples = ((labels, figure.read(one)) for labels, one in about)
        yield _family(f"{what}_{figure.name}", figure.kind, figure.text, names, samples)


def _refused(
    what: str, names: tuple[str, ...], about: Iterable[tuple[tuple[str, ...], ServedStatistics]]
) -> Metric:
    return _family(
        f"{what}_refused",
        "counter",
        "Requests refused before a handler ran, by reason.",
        (*names, "reason"),
        (
            ((*labels, reason), count)
            for labels, one in about
            for reason, count in one.refused.items()
        ),
    )


def _family(name: str, kind: str, text: str, names: tuple[str, ...], samples: Samples) -> Metric:
    """One family; samples with the same labels are added up, as no scraper takes them twice."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    summed: dict[tuple[str, ...], float] = {}
    for labels, value in samples:
        summed[labels] = summed.get(labels, 0.0) + value
    family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
        f"prpc_{name}", text, labels=names
    )
    for labels, value in summed.items():
        family.add_metric(labels, value)
    return family


def _seconds(
    name: str,
    text: str,
    names: tuple[str, ...],
    timings: Iterable[tuple[tuple[str, ...], MethodTiming]],
) -> HistogramMetricFamily:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(f"prpc_{name}", text, labels=names)
    for labels, timing in timings:
        below = sum(timing.buckets[:BUCKET_FIRST])
        buckets: list[tuple[str, float]] = []
        for power in range(BUCKET_FIRST, BUCKET_LAST + 1):
            below += timing.buckets[power]
            buckets.append((repr((1 << power) / 1e9), below))
        family.add_metric(labels, [*buckets, ("+Inf", timing.calls)], timing.total_s)
    return family


def _states(one: ClientStatistics) -> Mapping[str, int]:
    states = dict.fromkeys(STATES, 0)
    for route in one.ailing:
        states[route.state] += 1
    return {"well": one.routes - len(one.ailing), **states}


def _parts(key: str) -> tuple[str, str]:
    """("service", "number") of "service/number"; a service's name may have slashes."""
    service, _, number = key.rpartition("/")
    return service, number
