"""What the machine with a soft RDMA device is made of (guest.py runs it): Debian's kernel, an
emulator, and the programs of rdma-core, from packages that are unpacked and never installed.

    folder     from                                          as
    qemu/      qemu-system-x86 and what this host lacks      run here, by its own libraries
    guest/     rdma-core, pyverbs, busybox, iproute2         the upper layer of the guest's root
    vmlinux    linux-image-amd64, taken out of its bzImage   an ELF that qemu boots at once: to
                                                             unpack it under emulation takes seconds
    initrd     busybox, the modules, INIT                    a newc cpio, written here
    ready      what it was made of                           there once all else is

The folder is made beside the others and renamed at the end: it is there whole, or not at all. Its
name is a hash of this file and of the Debian release, so that a change makes a new one. As the
kernel of the "cloud" flavour has neither rdma_rxe nor 9p, it is the generic one.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

CACHE = "PRPC_RDMA_CACHE"  # where such folders are kept, if not below ~/.cache
KERNEL = "linux-image-amd64"
EMULATOR = ("qemu-system-x86",)
GUEST = (
    "libibverbs1",
    "librdmacm1",
    "libnl-3-200",
    "libnl-route-3-200",
    "ibverbs-providers",
    "libibumad3",
    "ibverbs-utils",
    "rdmacm-utils",
    "perftest",
    "libpci3",
    "python3-pyverbs",
    "busybox-static",
    "iproute2",
    "libmnl0",
    "libbpf1",
    "libelf1",
)
# With what they depend on, in the order in which they are loaded. crc32_generic: rxe asks for it by
# its name as an algorithm, which nobody looks up here.
MODULES = (
    *("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "dummy"),
    *("crc32_generic", "crc32c_generic", "libcrc32c"),
    *("ib_uverbs", "rdma_cm", "rdma_ucm", "rdma_rxe"),
)
# pyverbs alone, for a Python that is not Debian's and must not see its other packages.
PYVERBS = "opt/prpc/python"
XZ = b"\xfd7zXZ\0"
ELF = b"\x7fELF"

INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /host /guest /layers /root /bin
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
fail() { echo "guest: $* failed" > /dev/kmsg; sync; reboot -f; }
for module in $(cat /order); do insmod /modules/$module.ko || fail module $module; done
share() { mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,$3 $1 $2 || fail share $1; }
share host /host ro,cache=loose
share guest /guest ro,cache=loose
mount -t tmpfs -o mode=755 layers /layers; mkdir -p /layers/written /layers/work
layers=lowerdir=/guest:/host,upperdir=/layers/written,workdir=/layers/work
mount -t overlay -o $layers root /root || fail root
mkdir -p /root/proc /root/sys /root/dev /root/out
share out /root/out rw,cache=none
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm; mount -t devpts pts /dev/pts
ln -sf /proc/self/fd /dev/fd
for number in 0:stdin 1:stdout 2:stderr; do
    ln -sf /proc/self/fd/${number%:*} /dev/${number#*:}
done
for folder in proc sys dev; do mount --move /$folder /root/$folder; done
exec switch_root /root /out/begin
"""


class NoImage(Exception):
    """It cannot be made here, and why."""


def image(say: Callable[[str], object] = print) -> Path:
    """The folder, made if it is not there: some 100 MB of packages, half a minute. `say` is told of
    each step. Raises NoImage.
    """
    if platform.machine() != "x86_64" or shutil.which("apt-get") is None:
        raise NoImage(
            f"the machine is made of Debian's packages for x86-64, and this is {platform.machine()}"
            f"{'' if shutil.which('apt-get') else ' without apt-get'}"
        )
    kept = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "prpc-rdma")
    folder = kept / _key()
    if (folder / "ready").exists():
        return folder
    kept.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="making-", dir=kept))
    try:
        made.chmod(0o755)
        _make(made, say)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            made.rename(folder)
        except OSError:  # somebody else was quicker
            if not (folder / "ready").exists():
                raise
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or ""
        raise NoImage(
            f"{error} {said}; apt-get update, as root, is needed once: packages come from Debian's "
            "registry"
        ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _key() -> str:
    release = platform.freedesktop_os_release()
    parts = (Path(__file__).read_bytes(), release.get("VERSION_CODENAME", "").encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _make(folder: Path, say: Callable[[str], object]) -> None:
    kernel = run("apt-cache", "depends", KERNEL)
    found = re.search(r"Depends: (linux-image-\S+)", kernel)
    if found is None:
        raise NoImage(f"apt knows no {KERNEL}: apt-get update, as root, is needed once")
    for name, packages in (
        ("kernel", (found[1],)),
        ("qemu", tuple(_missing(EMULATOR))),
        ("guest", GUEST),
    ):
        say(f"fetching {len(packages)} packages for {name}/ ...")
        unpack(packages, folder / name)
    (folder / "guest" / PYVERBS).mkdir(parents=True)
    (folder / "guest" / PYVERBS / "pyverbs").symlink_to("/usr/lib/python3/dist-packages/pyverbs")
    say("taking the kernel apart ...")
    (folder / "vmlinux").write_bytes(_elf(next((folder / "kernel/boot").glob("vmlinuz-*"))))
    (folder / "initrd").write_bytes(_initrd(folder))
    shutil.rmtree(folder / "kernel")
    (folder / "ready").write_text(f"{found[1]}\n")


def run(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout


def _missing(packages: Sequence[str]) -> list[str]:
    """They, and what they depend on that this host does not have installed."""
    plan = run("apt-get", "-s", "install", "--no-install-recommends", *packages)
    return sorted({*packages, *re.findall(r"^Inst (\S+)", plan, re.MULTILINE)})


def unpack(packages: Sequence[str], folder: Path) -> None:
    """As one tree whose /bin and /lib are links into /usr: so it can lie over a root that has it
    so.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as fetched:
        run("apt-get", "-qq", "download", *packages, cwd=Path(fetched))
        for name in ("bin", "sbin", "lib", "lib64"):
            (folder / "usr" / name).mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(f"usr/{name}")
        for package in sorted(Path(fetched).glob("*.deb")):
            tree = subprocess.Popen(
                ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE
            )
            subprocess.run(
                ["tar", "x", "--keep-directory-symlink", "--no-same-owner", "-C", str(folder)],
                stdin=tree.stdout,
                check=True,
                capture_output=True,
            )
            if tree.wait():
                raise OSError(f"dpkg-deb cannot read {package.name}")


def _elf(packed: Path) -> bytes:
    """The kernel inside of a bzImage, or that itself where it is packed in another way."""
    data = packed.read_bytes()
    begin = data.find(XZ)
    if begin >= 0:
        try:
            kernel = lzma.LZMADecompressor().decompress(data[begin:])
        except lzma.LZMAError:
            return data
        if kernel.startswith(ELF):
            return kernel
    return data


def _modules(kernel: Path) -> dict[str, bytes]:
    """By name, each after what it depends on; those that the kernel has built in are left out."""
    files = {
        path.name.partition(".ko")[0].replace("-", "_"): path
        for path in kernel.glob("usr/lib/modules/*/**/*.ko*")
    }
    loaded: dict[str, bytes] = {}

    def load(name: str) -> None:
        path = files.get(name.replace("-", "_"))
        if path is None or name in loaded:
            return
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        depends = re.search(rb"\0depends=([^\0]*)\0", data)
        for other in depends[1].decode().split(",") if depends else []:
            load(other)
        loaded[name] = data

    for name in MODULES:
        load(name)
    if "rdma_rxe" not in loaded:
        raise NoImage("Debian's kernel has no module rdma_rxe")
    return loaded


def _initrd(folder: Path) -> bytes:
    modules = _modules(folder / "kernel")
    return b"".join(
        _entries(
            [
                ("bin", 0o040755, b"", (0, 0)),
                ("dev", 0o040755, b"", (0, 0)),
                ("modules", 0o040755, b"", (0, 0)),
                ("dev/console", 0o020600, b"", (5, 1)),
                ("bin/busybox", 0o100755, (folder / "guest/usr/bin/busybox").read_bytes(), (0, 0)),
                *((f"modules/{name}.ko", 0o100644, data, (0, 0)) for name, data in modules.items()),
                ("order", 0o100644, "\n".join(modules).encode(), (0, 0)),
                ("init", 0o100755, INIT.encode(), (0, 0)),
            ]
        )
    )


def _entries(files: Sequence[tuple[str, int, bytes, tuple[int, int]]]) -> Iterator[bytes]:
    """A cpio of format "newc" (cpio(5)): name, mode, data, and the numbers of a device."""
    for number, (name, mode, data, device) in enumerate(
        [*files, ("TRAILER!!!", 0, b"", (0, 0))], 1
    ):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        yield head + bytes(-len(head) % 4)
        yield data + bytes(-len(data) % 4)
