"""What `prpc doctor` looks at: each check reads a few files or asks the kernel, and answers with
findings.

Checks take a Host, whose files may lie under another root, so that tests can show them machines
that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prpc_engine.cli.checks import cpu, devices, limits, memory, settings, software
from prpc_engine.cli.checks.finding import Finding, Verdict
from prpc_engine.cli.checks.host import Host
from prpc_engine.cli.checks.peer import examine_peer

__all__ = ["Finding", "Host", "Verdict", "examine", "examine_peer"]

CHECKS: tuple[Callable[[Host], Iterator[Finding]], ...] = (
    cpu.machine,
    cpu.cores,
    cpu.siblings,
    cpu.quota,
    cpu.numa,
    cpu.clock,
    cpu.fence,
    memory.shared_memory,
    memory.shm_folder,
    memory.garbage,
    memory.huge_pages,
    limits.open_files,
    limits.locked_memory,
    limits.start_method,
    limits.loopback,
    limits.secret,
    settings.settings,
    devices.rdma,
    devices.cuda,
    devices.gpudirect,
    software.packages,
)


def examine(host: Host | None = None) -> list[Finding]:
    """All findings, in the order of CHECKS."""
    where = Host() if host is None else host
    return [finding for check in CHECKS for finding in check(where)]
