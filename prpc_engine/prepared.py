"""Types that values are converted to in several threads, made ready at import."""

from __future__ import annotations

import msgspec


def prepare(*kinds: type) -> None:
    """Have msgspec make ready what it knows of these types, and of those in them.

    It does so at a type's first use, otherwise, and the process dies (SIGSEGV, msgspec 0.22.0)
    where a second thread uses the type meanwhile. So whoever gives a Struct or a dataclass of ours
    to msgspec.convert() calls this in the module that has the type, or converts to it.
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
