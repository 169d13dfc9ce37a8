"""Figures as people read them."""

from __future__ import annotations


def duration(ns: float | None) -> str:
    """Nanoseconds, in the unit that leaves one to three digits before the point."""
    if ns is None:
        return "-"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{_three(ns / size)} {unit}"
    return f"{_three(ns)} ns"


def amount(value: float | None, unit: str = "") -> str:
    """A rate or a count with k, M, G."""
    if value is None:
        return "-"
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{_three(value / size)} {prefix}{unit}"
    return f"{_three(value)} {unit}".rstrip()


def size(size_bytes: int) -> str:
    """A size in the largest binary unit that leaves a whole number."""
    for unit, unit_bytes in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= unit_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes} {unit}"
    return f"{size_bytes} B"


def times(factor: float | None) -> str:
    """A ratio."""
    if factor is None:
        return "-"
    return f"{factor:,.0f} x" if factor >= 100 else f"{factor:.3g} x"


def _three(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
