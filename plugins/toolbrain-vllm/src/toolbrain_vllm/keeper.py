"""Runs a command until whoever started it is gone: `keeper.py COMMAND…`, run as a script.

A server must not outlive the program that it serves, however that one ends, and what it starts must
not outlive it. So this process leads a group of its own, and a pipe to its standard input tells it
when to end the group: it closes by itself where the program was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

#: Seconds that the command has for an orderly end.
_PATIENCE = 15


def main(command: list[str]) -> None:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    child.wait()
    os.killpg(0, signal.SIGKILL)  # this process too


def _watch(child: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read(1)
    child.terminate()
    try:
        child.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
