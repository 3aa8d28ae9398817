"""Where a trained model is saved: a directory that appears whole, and replaces nothing but a save.

`toolbrain.json` lists the files of the save it lies in. A directory that holds anything else (a
run, a base model, somebody's notes) is never replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ConfigurationError, ToolBrainError

#: Written last into what is saved, and into checkpoints.
MARKER = "toolbrain.json"


def check_replaceable(path: str | Path) -> None:
    """Errors: ConfigurationError where `path` is a file or holds anything but an earlier save."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file; give a directory to save to")
    if not target.is_dir():
        return
    foreign = sorted({entry.name for entry in target.iterdir()} - _files_of_save(target))
    if foreign:
        more = ", …" if len(foreign) > 3 else ""
        raise ConfigurationError(
            f"{target} holds other files than an earlier save ({', '.join(foreign[:3])}{more}); "
            "give a new directory to save to, or empty it"
        )


@contextmanager
def whole_directory(path: str | Path, facts: Mapping[str, Any]) -> Iterator[Path]:
    """A directory beside `path` that takes its place when the block ends well; `facts` are written
    into its `toolbrain.json`.

    Errors: as `check_replaceable`; ToolBrainError where it cannot be written, and then what was at
    `path` is as before.
    """
    check_replaceable(path)
    target = Path(path).resolve()
    folder: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        yield folder
        files = sorted([MARKER, *(entry.name for entry in folder.iterdir())])
        text = json.dumps({"schema": 1, **facts, "files": files}, indent=2)
        (folder / MARKER).write_text(text + "\n", encoding="utf-8")
        _take_place(folder, target)
    except ToolBrainError:
        raise
    except Exception as error:  # safetensors and tokenizers raise their own for a full disk
        raise ToolBrainError(
            f"cannot save to {path}: {error}. Nothing was changed there: make room, or save to "
            "another directory"
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def replace_file(path: Path, text: str) -> None:
    """Replace a file by `text`, atomically: a reader sees the old one or the new one.

    Errors: OSError, and then what was there is as before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _take_place(folder: Path, target: Path) -> None:
    folder.chmod(0o755)
    if not target.exists():
        folder.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    target.rename(old / "was")
    folder.rename(target)
    shutil.rmtree(old)


def _files_of_save(folder: Path) -> set[str]:
    try:
        marker = json.loads((folder / MARKER).read_bytes())
    except (OSError, ValueError):
        return set()
    files = marker.get("files") if isinstance(marker, dict) else None
    return set(files) if isinstance(files, list) else set()


__all__ = ["MARKER", "check_replaceable", "replace_file", "whole_directory"]
