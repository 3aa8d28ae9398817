"""Memory that was freed, and that the C library keeps."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def trim_heap() -> None:
    """Give freed memory back to the system.

    glibc keeps a heap for each thread and hands none of it to the others: a sampler and a trainer
    that take turns would each hold on to what it had at its peak.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None where the C library is another one."""
    try:
        trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # Windows names no library of the whole process
        return None
    return trim
