"""What people write on the command line: options, files of tasks, and `module:attribute`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigurationError, DataError, ToolBrainError
from .traces import read_objects

#: Keywords of `Brain` that have a flag of their own.
_FLAGS = {
    "algorithm": "--algorithm",
    "reward_func": "--reward",
    "run_dir": "--run-dir",
    "seed": "--seed",
    "name": "--run-name",
    "resume": "--resume",
}


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` pairs as keywords: `learning-rate=2e-4` is `{"learning_rate": 0.0002}`.

    Errors: ConfigurationError for a pair without `=`, a key given twice or one that has a flag.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        word, equals, text = pair.partition("=")
        key = word.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise ConfigurationError(f"-o {pair}: key=value is needed")
        if key in _FLAGS:
            raise ConfigurationError(f"-o {pair}: use {_FLAGS[key]}")
        if key in options:
            raise ConfigurationError(f"-o {pair}: {key} is given twice")
        try:
            options[key] = json.loads(text)
        except json.JSONDecodeError:
            options[key] = text
    return options


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """The task dicts of a `.jsonl` file, or of a `.json` file that holds a list.

    Errors: DataError that names the file, and the line where there is one.
    """
    if path.suffix == ".jsonl":
        return _all_lines(path)
    if path.suffix != ".json":
        raise DataError(f"{path}: tasks are read from .jsonl, or from .json with a list")
    data = read_json(path)
    if not isinstance(data, list):
        raise DataError(f"{path}: a list of tasks is needed, not {type(data).__name__}")
    return data


def read_json(path: Path) -> Any:
    """What a JSON file holds. Errors: DataError that names the file and the line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error})") from None


def _all_lines(path: Path) -> list[dict[str, Any]]:
    """Every line: a torn last one is normal in a journal, but here it is a task that was lost."""
    tasks = [task for _, task in read_objects(path)]  # a task's own "schema" is none of ours
    with path.open(encoding="utf-8") as lines:
        written = sum(1 for line in lines if line.strip())
    if len(tasks) < written:
        raise DataError(f"{path}: its last line is not JSON")
    return tasks


def load_target(where: str) -> Any:
    """The object that `module:attribute` or `file.py:attribute` names.

    The current folder (or the file's) comes first on the import path, as it does for a script.
    Errors: ConfigurationError that says which part is missing, or what importing it raised.
    """
    place, _, attribute = where.rpartition(":")
    if not place or not attribute:
        raise ConfigurationError(f"{where!r}: write module:attribute or file.py:attribute")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
    except ToolBrainError:
        raise
    # The user's own module may raise anything, or be a script that ends in exit().
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{where!r}: importing {place} raised {type(error).__name__}: {error}"
        ) from error
    try:
        return pkgutil.resolve_name(f"{module.__name__}:{attribute}")
    except AttributeError:
        public = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise ConfigurationError(
            f"{where!r}: {place} has no {attribute!r}; it has: {public}"
        ) from None


def _module(name: str) -> ModuleType:
    _put_first_on_path(Path.cwd())
    return importlib.import_module(name)


def _module_of_file(path: Path) -> ModuleType:
    """The module in a file, imported once, under its own name unless that one is taken."""
    path = path.resolve()
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    name = path.stem
    for known in (sys.modules.get(name), sys.modules.get(f"{name}_file")):
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
    if importlib.util.find_spec(name) is not None:
        name = f"{name}_file"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} cannot be imported")
    _put_first_on_path(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _put_first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
