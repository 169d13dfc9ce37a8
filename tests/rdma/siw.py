"""The kernel's module siw (soft iWARP), compiled, since Debian's kernel is without it: for a guest
with `--link siw` alone (guest.py loads it).

    package                      has
    linux-source-6.1             drivers/infiniband/sw/siw
    linux-headers of the kernel  its configuration, and the versions of what it exports
    linux-headers-...-common     its header files
    linux-kbuild-6.1             the programs that make modules

They are unpacked into a folder that goes again, and nothing is installed. gcc and make are this
host's. The module is kept beside the images (image.py), under a hash of this file and of the
kernel's name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.rdma.image import NoImage, run, unpack

PREFIX = "linux-image-"
ABSOLUTE = "/usr/src/linux-headers"  # as the headers' Makefile includes the common ones


def siw_module(image: Path, say: Callable[[str], object] = print) -> Path:
    """The module for the kernel of that image, made if it is not there: some 150 MB of packages,
    one minute. `say` is told of each step. Raises NoImage.
    """
    kernel = (image / "ready").read_text().strip()
    key = hashlib.sha256(Path(__file__).read_bytes() + kernel.encode()).hexdigest()[:16]
    kept = image.parent / f"siw-{key}" / "siw.ko"
    if kept.exists():
        return kept
    if not (shutil.which("gcc") and shutil.which("make")):
        raise NoImage("siw is compiled, which takes gcc and make, and this host has not both")
    kept.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=image.parent) as folder:
        try:
            made = _compiled(kernel.removeprefix(PREFIX), Path(folder), say)
            whole = Path(folder, "whole")
            shutil.copy(made, whole)
            os.replace(whole, kept)
        except (OSError, StopIteration, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or ""
            raise NoImage(f"siw cannot be compiled for {kernel}: {error!r} {said}") from error
    return kept


def _compiled(release: str, folder: Path, say: Callable[[str], object]) -> Path:
    series = re.match(r"\d+\.\d+", release)
    if series is None:
        raise NoImage(f"{release} is no release of a kernel")
    packages = (
        f"linux-headers-{release}",
        f"linux-headers-{release.rpartition('-')[0]}-common",
        f"linux-kbuild-{series[0]}",
        f"linux-source-{series[0]}",
    )
    say(f"fetching {len(packages)} packages for siw ...")
    unpack(packages, folder / "root")
    say("compiling siw ...")
    root = folder / "root/usr/src"
    archive = next(root.glob("linux-source-*.tar.xz"))
    sources = f"{archive.name.removesuffix('.tar.xz')}/drivers/infiniband/sw/siw"
    run("tar", "xJf", str(archive), "-C", str(folder), sources)
    headers = root / f"linux-headers-{release}"
    makefile = headers / "Makefile"
    makefile.write_text(makefile.read_text().replace(ABSOLUTE, f"{root}/linux-headers"))
    module = folder / sources
    run("make", "-s", "-C", str(headers), f"M={module}", "CONFIG_RDMA_SIW=m", "modules")
    return module / "siw.ko"
