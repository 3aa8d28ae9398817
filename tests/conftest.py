"""What all tests need of their process."""

from __future__ import annotations

import gc
import signal

import pytest

# A shell that starts the tests in the background lets them ignore Ctrl-C, and their subprocesses
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first: of several processes, none is left alone with one in the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Leave the millions of objects of torch and others out of later collections: every trainer
    asks for a whole one, which took a tenth of its time."""
    gc.collect()
    gc.freeze()
