"""NodeConfig: everything that a node is told before it starts. Read once, checked once, passed
whole.

    layer        what                                           origin, as `prpc config` shows it
    default      the fields of the sections below               default
    file         the TOML file that PRPC_CONFIG names           FILE: [shards]
    environment  PRPC_* variables, above them those of a role   PRPC_SHARDS='4'
    argument     what the program passes: RpcService(shards=4)  argument shards

A later layer replaces an earlier one, setting by setting.

    setting           argument    variable             of a role: ps, then worker and chief
    node.transports   transports  PRPC_TRANSPORTS
    shards.count      shards      PRPC_SHARDS          NETWORK_PS_CORE_NUMBER
                                                       NETWORK_WORKER_CORE_NUMBER
    shards.polling    polling     PRPC_ENABLE_POLLING  PS_ENABLE_POLLING
                                                       WORKER_ENABLE_POLLING
    shards.pin_cores  pin_cores   PRPC_PIN_CORES       PS_DISABLE_PIN_CORES
                                                       WORKER_DISABLE_PIN_CORES
    transport.verbs_device         PRPC_VERBS_DEVICE
    network           by name                          those of every role: network.py
    secret            secret      PRPC_SECRET_FILE, PRPC_SECRET
    tls               tls         PRPC_TLS_CERT, PRPC_TLS_KEY, PRPC_TLS_CA

A role's variables have twins that begin with PRPC_, and jobs other than ps, worker and chief read
some of them (network.py). A process without a role reads none.

Nothing of a process with a role is pinned by default, as in GRPC++; without a role each shard of
an RpcService stays on one core.

A role's number counts the cores that communicate: 1 is the process itself, a larger number that
many shards. A count of a variable or a file is clamped to the cores of this process's cpuset, with
a line in `notes`: it was written for a kind of machine, and a job moves between machines. An
argument is taken as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec
from msgspec.structs import replace

from prpc_engine.errors import ConfigError, is_number
from prpc_engine.prepared import prepare
from prpc_engine.settings import layers
from prpc_engine.settings.address import Address
from prpc_engine.settings.allow import AllowList
from prpc_engine.settings.config import (
    ALL_TRANSPORTS,
    TIMEOUT_S_MAX,
    TlsSettings,
    advertise_from,
    check_tls,
    secret_from,
)
from prpc_engine.settings.config_file import ConfigFile
from prpc_engine.settings.layers import Found, is_count
from prpc_engine.settings.network import DEFAULT, OF_NETWORK, FoundValue
from prpc_engine.settings.sections import (
    AUTO,
    LIMITS,
    SECTIONS,
    SHARDS_MAX,
    WHOLE,
    NetworkSection,
    NodeArguments,
    NodeSection,
    ShardsSection,
    TransportSection,
)
from prpc_engine.settings.user_secret import user_secret
from shard import (
    DEFAULT_LIMITS,
    Limits,
    RestartPolicy,
    auto_shards,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

prepare(*SECTIONS.values(), Limits)


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a node is told before it starts. Made by load(), which checks it.

    secret   of the job, of this user on this host, or none (b""). No text shows it
    limits   of every connection
    tls      for tcp; None: no TLS
    allow    who may call which methods of its servers
    origins  where each setting comes from, by name: "shards.count" -> "PRPC_SHARDS='4'"
    notes    a line for the log for each value that does not hold as it was asked for
    """

    node: NodeSection
    shards: ShardsSection
    transport: TransportSection
    network: NetworkSection
    limits: Limits
    secret: bytes
    tls: TlsSettings | None
    allow: AllowList
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @classmethod
    def load(
        cls, role: str = "", tasks: int | None = None, **arguments: Unpack[NodeArguments]
    ) -> NodeConfig:
        """From the file, this process's environment, and these arguments.

        role   whose variables count: "ps", "worker", "chief", another job, or "" for none
        tasks  of the cluster: a role's core number is at most so many; None: there is no cluster

        Raises ConfigError, which names the setting, its value, where it comes from and what is
        allowed, and TypeError for an argument that is unknown.
        """
        given, notes = layers.of_arguments(arguments), list[str]()
        of_file = layers.of_file(ConfigFile.read(os.environ.get("PRPC_CONFIG", "")))
        found = {**layers.of_role(role), **of_file, **layers.of_environment(role, given), **given}
        layers.settle_count(found, tasks, notes)
        return _build(found, tuple(notes))

    def override(self, **arguments: Unpack[NodeArguments]) -> NodeConfig:
        """The same with these arguments in place of what it says. Raises as load()."""
        found = {
            name: Found(
                value, name if name == "secret" else f"{name} = {value!r}", self.origins[name]
            )
            for name, value in self.settings()
        }
        found.update(layers.of_arguments(arguments))
        return _build(found, self.notes)

    def listening_at(
        self,
        bind: Address,
        transports: Sequence[str] | None = None,
        advertise: Address | None = None,
    ) -> NodeConfig:
        """The same for another node of this process: at that address, over those transports,
        reached at `advertise`. transports None: its own.
        """
        chosen = self.node.transports if transports is None else tuple(transports)
        return replace(
            self, node=replace(self.node, bind=bind, transports=chosen, advertise=advertise)
        )

    def limited_to(self, limits: Limits) -> NodeConfig:
        """The same with other limits."""
        return replace(self, limits=limits)

    def found_network(self) -> dict[str, FoundValue[Any]]:
        """Section [network] by name, with where each setting comes from."""
        return {
            name: FoundValue(getattr(self.network, name), self.origins[f"network.{name}"])
            for name in NetworkSection.__struct_fields__
        }

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Each setting and its value, by name."""
        for section in SECTIONS:
            for name, value in msgspec.structs.asdict(getattr(self, section)).items():
                yield f"{section}.{name}", value
        for name, value in asdict(self.limits).items():
            yield f"limits.{name}", value
        for name in WHOLE:
            yield name, getattr(self, name)

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """All fields but the secret."""
        names = [name for name in self.__struct_fields__ if name != "secret"]
        return [(name, getattr(self, name)) for name in names]

    def __repr__(self) -> str:
        return (
            f"NodeConfig({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"
        )


# -- values ----------------------------------------------------------------------------------------


def _build(found: dict[str, Found], notes: tuple[str, ...]) -> NodeConfig:
    """Check all values, one by one and then together. Raises ConfigError."""
    sections = {section: _section(section, kind, found) for section, kind in SECTIONS.items()}
    secret = secret_from(found["secret"].value) if "secret" in found else user_secret()
    allow = found["allow"].value if "allow" in found else AllowList()
    if not isinstance(allow, AllowList):
        raise found["allow"].refused("an AllowList is expected, such as AllowList([Rule(...)])")
    config = NodeConfig(
        **sections,
        limits=limits_of(found),
        secret=secret,
        tls=tls_of(found, secret),
        allow=allow,
        origins={},
        notes=notes,
    )
    if config.node.allow_pickle and not secret:
        raise ConfigError(
            "allow_pickle=True needs a secret of the job (PRPC_SECRET_FILE): "
            "who may send a pickle may run anything here"
        )
    names = (name for name, _ in config.settings())
    origins = {name: found[name].origin if name in found else DEFAULT for name in names}
    return replace(config, origins=origins)


def value_of(name: str, found: Mapping[str, Found]) -> Any:
    """One setting of a section, by its name: as found, else by default. Raises ConfigError."""
    section, _, field = name.partition(".")
    return getattr(
        _section(section, SECTIONS[section], {name: found[name]} if name in found else {}), field
    )


def network_of_process(environ: Mapping[str, str]) -> dict[str, FoundValue[Any]]:
    """Section [network] as the file and these variables have it, by name. Raises ConfigError."""
    found = layers.of_file(ConfigFile.read(environ.get("PRPC_CONFIG", "")))
    for name, variable in OF_NETWORK.items():
        one = variable.find(environ)
        if one.origin != DEFAULT:
            found[name] = Found(one.value, one.origin, one.origin)
    return {
        name.partition(".")[2]: FoundValue(
            value_of(name, found), found[name].origin if name in found else DEFAULT
        )
        for name in OF_NETWORK
    }


def _section(section: str, kind: type[msgspec.Struct], found: Mapping[str, Found]) -> Any:
    values = {}
    for name in kind.__struct_fields__:
        one = found.get(f"{section}.{name}")
        if one is not None:
            values[name] = _READERS.get(f"{section}.{name}", _plain)(one)
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, OverflowError):
        for name, value in values.items():  # which of them, and what it may be
            try:
                msgspec.convert({name: value}, kind)
            except (msgspec.ValidationError, OverflowError) as error:
                raise found[f"{section}.{name}"].refused(_allowed(kind, name)) from error
        raise


def _plain(one: Found) -> Any:
    """A number of any kind as Python's own: msgspec takes no other."""
    value = one.value
    if isinstance(value, bool | int | str | type(None)) or not is_number(value):
        return value
    return float(value)


def _switch(one: Found) -> Any:
    return bool(one.value) if isinstance(one.value, int) and one.value in (0, 1) else one.value


def _allowed(kind: type[msgspec.Struct], name: str) -> str:
    """What its type says, or one of the types it may have."""
    hint = get_type_hints(kind, include_extras=True)[name]
    for one in (hint, *get_args(hint)):
        for note in getattr(one, "__metadata__", ()):
            if isinstance(note, msgspec.Meta) and note.description:
                return note.description
    raise AssertionError(f"{kind.__name__}.{name} does not say what is allowed")


def _count(one: Found) -> int:
    if one.value == AUTO:
        return auto_shards()
    if not is_count(one.value) or one.value > SHARDS_MAX:
        is_argument = one.origin.startswith("argument ")  # the others are clamped
        allowed = f"0 to {SHARDS_MAX}" if is_argument else "0 on"
        raise one.refused(f'a whole number from {allowed} is allowed, or "{AUTO}"')
    return int(one.value)


def _transports(one: Found) -> tuple[str, ...]:
    names = one.value
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    known = is_list and all(name in ALL_TRANSPORTS for name in names)
    if known and names and len(set(names)) == len(names):
        return tuple(names)
    raise one.refused(
        f"allowed are {', '.join(ALL_TRANSPORTS)}, at least one, each once, in order of preference"
    )


def _bind(one: Found) -> Address:
    if isinstance(one.value, Address):
        return one.value
    if not isinstance(one.value, str):
        raise one.refused('"host:port" is expected')
    try:
        return Address.parse(one.value, port_min=0)
    except ConfigError as error:
        raise one.refused(str(error)) from error


def _advertise(one: Found) -> Address | None:
    if one.value is None or isinstance(one.value, Address):  # of a config that is overridden
        return one.value
    return advertise_from(one.value, one.text)


def _stall_budget(one: Found) -> float:
    seconds = one.value
    is_one = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_one or not (0 < seconds <= TIMEOUT_S_MAX or seconds == math.inf):
        raise one.refused(
            f"more than 0 and at most {TIMEOUT_S_MAX:.0f} seconds are allowed, or math.inf for none"
        )
    return float(seconds)


def _port_offset(one: Found) -> Any:
    if one.value == 0:
        raise one.refused(_allowed(NetworkSection, "data_port_offset"))
    return _plain(one)


def _restart(one: Found) -> RestartPolicy:
    if isinstance(one.value, RestartPolicy):
        return one.value
    try:
        return RestartPolicy(one.value)
    except ValueError as error:
        raise one.refused(str(error).partition(": ")[2]) from None


_READERS = {
    "node.bind": _bind,
    "node.advertise": _advertise,
    "node.transports": _transports,
    "node.stall_budget_s": _stall_budget,
    "node.timing": _switch,
    "node.allow_pickle": _switch,
    "shards.count": _count,
    "shards.polling": _switch,
    "shards.pin_cores": _switch,
    "shards.restart": _restart,
    "network.data_port_offset": _port_offset,
    "network.tensor_fuse": _switch,
}


def limits_of(found: Mapping[str, Found]) -> Limits:
    """All limits: those that were found, the others by default. Raises ConfigError, which names
    each that is not allowed.
    """
    values = {name: found[f"limits.{name}"] for name in LIMITS if f"limits.{name}" in found}
    if not values:
        return DEFAULT_LIMITS
    wrong = [text for name, one in values.items() if (text := _wrong_limit(name, one))]
    if wrong:
        raise ConfigError("; ".join(wrong))
    return msgspec.convert({name: one.value for name, one in values.items()}, Limits)


def _wrong_limit(name: str, one: Found) -> str:
    """What is wrong with it, in words that name it; "": nothing."""
    if isinstance(one.value, bool) or not isinstance(one.value, int | float):
        return str(one.refused(f"numbers are allowed for {', '.join(sorted(LIMITS))}"))
    alone: dict[str, Any] = {name: one.value}  # each limit has bounds of its own
    try:
        Limits(**alone)
    except ValueError as error:
        return str(one.refused(str(error).rpartition(": ")[2]))
    return ""


def tls_of(found: Mapping[str, Found], secret: bytes) -> TlsSettings | None:
    """TLS where it was found, and can be used with this secret. Raises ConfigError."""
    one = found.get("tls")
    if one is None or one.value is None:
        return None
    return check_tls(one.value, secret, "tls=" if one.origin == "argument tls" else one.text)
