"""Runs a command on a machine with RDMA, where there is none: Debian's kernel under an emulator,
with a soft RoCE device (rxe), and with this host's file system as its own.

    python -m tests.rdma.guest prepare
    python -m tests.rdma.guest [--memory 1024] [--timeout 300] [--devices 1] [--link siw] \\
        run -- COMMAND ...

    of the guest       is
    /                  this host's, read-only, below the unpacked packages (image.py), below a
                       tmpfs that takes what is written and is gone with the guest
    /out               a folder of this host: the script `begin`, and `code`, the exit code
    stdout, stderr     two virtio ports: the bytes as the command wrote them
    rxe0, rxe1, ...    each on a dummy network device of its own, 10.77.N.1/24
    siw0, siw1, ...    in their place with --link siw: soft iWARP, whose module siw.py compiles
    what it may lock   all of its memory (ulimit -l unlimited)

No root, no KVM, nothing installed. Exit code: the command's; 124 when it took too long; 125 when
the guest ended without one, with the end of its kernel's log.

One virtual core: with two on one real core, one spins while the other should run. What is shown
here says nothing of races, of memory order, or of a device's own speed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.rdma.image import PYVERBS, NoImage, image
from tests.rdma.siw import siw_module

GUEST = "PRPC_RDMA_GUEST"  # set in it, to the kind of its devices
RXE, SIW = LINKS = "rxe", "siw"
TIMED_OUT, NO_CODE = 124, 125
BOOT_S = 120.0  # some 4 s on a machine that does nothing else
# 4200: rxe's own MTU is then 4096, the largest there is
BEGIN = """#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
hostname guest
ip link set lo up
{load}
for number in $(seq 0 {last}); do
    ip link add dummy$number type dummy 2>/dev/null
    ip link set dummy$number address 02:00:0a:4d:0$number:01 mtu 4200 up
    ip addr add 10.77.$number.1/24 dev dummy$number
    rdma link add {link}$number type {link} netdev dummy$number
done
ulimit -l unlimited
cd {folder} && env {environment} timeout -k 5 {timeout_s} {command} \\
    < /dev/null > /dev/vport0p1 2> /dev/vport0p2
echo $? > /out/code
sync
/bin/busybox reboot -f
"""
# without what an emulator does byte by byte (`rep movsb`), and what checks each of its copies
CPU = "max,-erms,-fsrm,-smap,-smep,-umip,-la57"
# the last line: nothing here guards a secret, and much of an emulated second is what they spare
APPEND = (
    "console=ttyS0 panic=-1 rdinit=/init mitigations=off nokaslr audit=0 apparmor=0 selinux=0 "
    "random.trust_cpu=on no_timer_check tsc=reliable nowatchdog net.ifnames=0 loglevel=5 "
    "norandmaps init_on_alloc=0 hardened_usercopy=off rcupdate.rcu_expedited=1"
)


def run(
    command: Sequence[str],
    folder: Path,
    environment: dict[str, str] | None = None,
    memory_mib: int = 1024,
    timeout_s: int = 300,
    devices: int = 1,
    link: str = RXE,
) -> int:
    """Run it in `folder`; its exit code. What it writes to stdout and stderr goes to ours. Raises
    NoImage.
    """
    made = image(_say)
    load = ""
    if link == SIW:
        load = f"/bin/busybox insmod {shlex.quote(str(siw_module(made, _say).resolve()))}"
    given = {"PATH": os.environ["PATH"], GUEST: link, **(environment or {})}
    given["PYTHONPATH"] = os.pathsep.join(
        filter(None, (given.get("PYTHONPATH", ""), f"/{PYVERBS}"))
    )
    with tempfile.TemporaryDirectory(prefix="prpc-rdma-") as out:
        begin = Path(out, "begin")
        begin.write_text(
            BEGIN.format(
                last=devices - 1,
                link=link,
                load=load,
                folder=shlex.quote(str(folder)),
                environment=" ".join(shlex.quote(f"{name}={is_}") for name, is_ in given.items()),
                timeout_s=timeout_s,
                command=shlex.join(command),
            )
        )
        begin.chmod(0o755)
        log = Path(out, "log")
        emulator = _started(made, Path(out), log, memory_mib)
        try:
            emulator.wait(timeout_s + BOOT_S)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            emulator.kill()
            emulator.wait()
        code = Path(out, "code")
        if code.exists() and (text := code.read_text().strip()).isdigit():
            return int(text)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        print("\n".join(["the guest ended; its log:", *lines[-30:]]), file=sys.stderr)
        return NO_CODE


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _started(made: Path, out: Path, log: Path, memory_mib: int) -> subprocess.Popen[bytes]:
    root = made / "qemu"
    ports, kept = [], []
    for number, stream in enumerate((sys.stdout, sys.stderr), 1):
        kept.append(os.dup(stream.fileno()))
        ports += [
            *("-add-fd", f"fd={kept[-1]},set={number}"),
            *("-chardev", f"file,id=port{number},path=/dev/fdset/{number},append=on"),
            *("-device", f"virtserialport,nr={number},chardev=port{number}"),
        ]
    shares = []
    for name, path, mode in (
        ("host", Path("/"), "on"),
        ("guest", made / "guest", "on"),
        ("out", out, "off"),
    ):
        shares += [
            "-fsdev",
            f"local,id={name},path={path},security_model=none,multidevs=remap,readonly={mode}",
            *("-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"),
        ]
    sys.stdout.flush()
    sys.stderr.flush()
    libraries = (root / "usr/lib/x86_64-linux-gnu", root / "usr/lib")
    try:
        return subprocess.Popen(
            [
                str(root / "usr/bin/qemu-system-x86_64"),
                *("-L", str(root / "usr/share/qemu"), "-L", str(root / "usr/share/seabios")),
                *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
                *("-M", "pc", "-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", "1"),
                *("-m", str(memory_mib), "-append", APPEND),
                *("-kernel", str(made / "vmlinux"), "-initrd", str(made / "initrd")),
                *("-serial", f"file:{log}", "-device", "virtio-serial-pci"),
                *ports,
                *shares,
            ],
            env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))},
            stdin=subprocess.DEVNULL,
            pass_fds=kept,
        )
    finally:
        for descriptor in kept:
            os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: see the file's head."""
    parser = argparse.ArgumentParser(prog="python -m tests.rdma.guest", description=__doc__)
    parser.add_argument("--memory", type=int, default=1024, metavar="MiB")
    parser.add_argument("--timeout", type=int, default=300, metavar="S", help="of the command")
    parser.add_argument("--devices", type=int, default=1, metavar="N")
    parser.add_argument("--link", choices=LINKS, default=RXE, help="the kind of the devices")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    given = parser.parse_args(arguments)
    try:
        if given.what == "prepare":
            print(made := image())
            if given.link == SIW:
                print(siw_module(made))
            return 0
        command = [one for one in given.command if one != "--"]
        if not command:
            parser.error("run needs a command: run -- COMMAND ...")
        wrong = [one for one in given.env if not re.match(r"\w+=", one)]
        if wrong:
            parser.error(f"--env {wrong[0]!r}: NAME=VALUE is allowed")
        environment = dict(one.split("=", 1) for one in given.env)
        return run(
            command,
            Path.cwd(),
            environment,
            given.memory,
            given.timeout,
            given.devices,
            given.link,
        )
    except NoImage as error:
        print(f"there is no machine with RDMA: {error}", file=sys.stderr)
        return NO_CODE


if __name__ == "__main__":
    raise SystemExit(main())
