"""What each layer of the settings says, by the names of NodeConfig's settings. Which layer holds,
and whether a value is allowed, is decided where they meet (node_config.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prpc_engine.errors import ConfigError
from prpc_engine.settings import network
from prpc_engine.settings.allow import rules_from
from prpc_engine.settings.config import (
    TLS_VARIABLES,
    TlsSettings,
    secret_from,
    secret_variable,
    variable_text,
)
from prpc_engine.settings.config_file import ConfigFile
from prpc_engine.settings.sections import LIMITS, SECTIONS, SETTING_OF, SHARDS_MAX
from shard import Limits, usable_cores

ENDPOINT_MAP = "network.endpoint_map_folder"
CORES, COUNT, ARGUMENT_OF_COUNT = "cores", "shards.count", "shards"


class Found(NamedTuple):
    """A value of one layer, how an error names the two, and where it comes from."""

    value: Any
    text: str
    origin: str

    def refused(self, allowed: str) -> ConfigError:
        """What to raise for a value that is none of those allowed."""
        return ConfigError(f"{self.text}: {allowed}")


def of_arguments(arguments: Mapping[str, Any]) -> dict[str, Found]:
    """What a program passes; None as if it did not. Raises TypeError for an unknown one,
    ConfigError for limits that are none.
    """
    found = {}
    for name, value in arguments.items():
        if name not in SETTING_OF:
            raise TypeError(f"unknown argument {name!r}: there are {', '.join(SETTING_OF)}")
        if value is None:
            continue
        text = "secret=" if name == "secret" else f"{name}={value!r:.100}"
        one = Found(value, text, f"argument {name}")
        if name != "limits":
            found[SETTING_OF[name]] = one
        elif isinstance(value, Limits):
            found.update(
                {f"limits.{key}": one._replace(value=getattr(value, key)) for key in LIMITS}
            )
        else:
            raise one.refused("Limits are expected, such as Limits(connections_per_peer=3)")
    return found


def of_role(role: str) -> dict[str, Found]:
    """What holds by default for a role, below all that is said: as in GRPC++ nothing is pinned
    unless DISABLE_PIN_CORES is 0, PRPC_PIN_CORES is 1, or the file or an argument says so.
    """
    return {"shards.pin_cores": Found(False, "pin_cores", network.DEFAULT)} if role else {}


def of_file(file: ConfigFile) -> dict[str, Found]:
    """What the file says. Raises ConfigError for settings that are unknown, and for rules of
    [[allow]] that are none.
    """
    found: dict[str, Found] = {}
    allowed = {section: kind.__struct_fields__ for section, kind in SECTIONS.items()}
    for section, names in {**allowed, "limits": LIMITS, "tls": tuple(TLS_VARIABLES)}.items():
        where = file.where(section)
        for name, value in file.table(section).items():
            one = Found(value, f"{where} {name} = {value!r}", where)
            if name not in names:
                raise one.refused(f"unknown; allowed are {', '.join(names)}")
            found[f"{section}.{name}"] = one
    folder = found.get(ENDPOINT_MAP)
    if folder is not None and isinstance(folder.value, str) and folder.value:
        found[ENDPOINT_MAP] = folder._replace(value=str(Path(file.path).parent / folder.value))
    paths = {name: found.pop(f"tls.{name}") for name in TLS_VARIABLES if f"tls.{name}" in found}
    for one in paths.values():
        if not isinstance(one.value, str) or not one.value:
            raise one.refused(f"paths are allowed for {', '.join(TLS_VARIABLES)}")
    if paths:
        where, beside = file.where("tls"), Path(file.path).parent
        files = {name: str(beside / one.value) for name, one in paths.items()}
        found["tls"] = Found(TlsSettings(**{"cert": "", "key": "", **files}), where, where)
    if "allow" in file.content:
        where = file.where("allow")
        found["allow"] = Found(rules_from(file.content["allow"], file.path), where, where)
    return found


def of_environment(role: str, given: Mapping[str, Found]) -> dict[str, Found]:
    """What the variables say, with a role's core number as CORES. All are read, also those that an
    argument replaces, but for the secret and TLS, which are in files of their own.
    """
    asked = network.found_in(os.environ, role)
    found = {name: Found(one.value, one.origin, one.origin) for name, one in asked.items()}
    by = secret_variable()
    if by and "secret" not in given:
        found["secret"] = Found(secret_from(None), by, by)
    if "tls" not in given:
        found.update(tls_of_environment())
    return found


def tls_of_environment() -> dict[str, Found]:
    """TLS, where any of its variables is set. Raises ConfigError for one that is empty."""
    files = {name: variable_text(variable) for name, variable in TLS_VARIABLES.items()}
    given = {name: path for name, path in files.items() if path is not None}
    if not given:
        return {}
    by = ", ".join(f"{TLS_VARIABLES[name]}={path!r}" for name, path in given.items())
    return {
        "tls": Found(
            TlsSettings(**{"cert": "", "key": "", **given}), ", ".join(TLS_VARIABLES.values()), by
        )
    }


def settle_count(found: dict[str, Found], tasks: int | None, notes: list[str]) -> None:
    """Make one count of shards, for this machine, of those that may be asked for: an argument, else
    the role's core number, else PRPC_SHARDS, else the file.
    """
    cores, count = found.pop(CORES, None), found.get(COUNT)
    if count is not None and count.origin == f"argument {ARGUMENT_OF_COUNT}":
        return
    if cores is not None:
        if tasks is not None:
            rule = f"{cores.origin}: min({cores.value}, {tasks} tasks in the cluster)"
            cores = Found(max(1, min(cores.value, tasks)), cores.text, rule)
        cores = _clamped(cores, notes, own=1)
        found[COUNT] = cores._replace(value=0) if cores.value == 1 else cores
    elif count is not None:
        found[COUNT] = _clamped(count, notes)


def _clamped(asked: Found, notes: list[str], own: int = 0) -> Found:
    """A count that was written for any machine, on this one. Of cores, `own` is what the process
    itself takes: so many need no shards.
    """
    usable = len(usable_cores())
    most = min(SHARDS_MAX, usable)
    if not is_count(asked.value) or asked.value <= most:
        return asked
    notes.append(
        f"{asked.origin}: {asked.value} shards are asked for, and the cpuset of this process has "
        f"{usable} cores: there will be {most if most != own else 'none, its own process answers'}"
    )
    return asked._replace(value=most, origin=f"{asked.origin}: clamped to {most} of {usable} cores")


def is_count(value: object) -> bool:
    """Whether it is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
