"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def size(count: int) -> str:
    """Bytes for people: ``1.2 GB``, in powers of 1000 as disks are sold."""
    amount, unit = float(count), 0
    while amount >= 999.5 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}" if amount < 99.95 else f"{amount:.0f} {_UNITS[unit]}"
