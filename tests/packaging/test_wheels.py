"""Everything as users get it: wheels, built and installed into one clean virtual environment.

Nothing here sees the editable installation that the other tests use.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
HELLO = ROOT / "contrib" / "toolbrain-hello"
BUILD = ["wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir"]


def pip(python, *arguments):
    run(python, "-m", "pip", *arguments)


def run(*command, cwd=None):
    """Run a command as if no checkout were near; its output."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "TOOLBRAIN_BLOCK_PLUGINS"}
    clean = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """One wheel each of the core, every plugin and the tutorial's package."""
    folder = tmp_path_factory.mktemp("wheels")
    pip(sys.executable, *BUILD, folder, ROOT, *PLUGINS, HELLO)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def venv(tmp_path_factory, wheels):
    """A clean environment with every wheel and its real requirements."""
    place = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", place)
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    install = ["install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt"]
    pip(python, *install, "torch", *index)
    pip(python, *install, *wheels)
    yield python
    # About 2 GB in 40,000 files, which takes a minute: nothing has to wait for that.
    remove = f"import shutil; shutil.rmtree({str(place)!r}, ignore_errors=True)"
    subprocess.Popen([sys.executable, "-c", remove], start_new_session=True)


def plugins_list(python, cwd):
    rows = json.loads(run(python.parent / "toolbrain", "plugins", "list", "--json", cwd=cwd))
    return {row["distribution"]: row for row in rows}


def test_every_wheel_holds_its_package_its_type_marker_and_nothing_else(wheels):
    assert len(wheels) == len(PLUGINS) + 2
    for wheel in wheels:
        package = wheel.name.split("-")[0]
        names = zipfile.ZipFile(wheel).namelist()
        assert f"{package}/py.typed" in names
        top = {name.partition("/")[0] for name in names}
        assert top == {package, f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}


def test_every_installed_plugin_is_found_and_ok(venv, tmp_path):
    rows = plugins_list(venv, tmp_path)
    expected = {"toolbrain-core", "toolbrain-hello", *(path.name for path in PLUGINS)}
    assert set(rows) == expected
    assert {row["status"] for row in rows.values()} == {"ok"}, rows


def test_the_core_comes_from_the_wheel_and_not_from_the_checkout(venv, tmp_path):
    place = run(venv, "-c", "import toolbrain_core; print(toolbrain_core.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(venv.parent.parent)


def test_discovery_imports_nothing_heavy(venv, tmp_path):
    assert "toolbrain-grpo" in run(venv, HERE / "discover_light.py", cwd=tmp_path)


def test_the_reward_of_a_third_party_package_is_found_by_name(venv, tmp_path):
    code = (
        "from toolbrain_core import PluginManager, Trace\n"
        "reward = PluginManager().registries['rewards'].get('hello')\n"
        "print(reward(Trace(final_answer='Hello')))"
    )
    assert run(venv, "-c", code, cwd=tmp_path).strip() == "1.0"


def test_the_template_becomes_a_working_plugin_by_its_own_instructions(venv, tmp_path):
    place = tmp_path / "toolbrain-mine"
    shutil.copytree(ROOT / "contrib" / "template", place)
    (place / "src" / "toolbrain_template").rename(place / "src" / "toolbrain_mine")
    for path in [path for path in place.rglob("*") if path.is_file()]:
        path.write_text(path.read_text(encoding="utf-8").replace("template", "mine"), "utf-8")
    pip(sys.executable, *BUILD, tmp_path, place)
    pip(venv, "install", "--quiet", "--no-deps", *tmp_path.glob("*.whl"))
    try:
        mine = plugins_list(venv, tmp_path)["toolbrain-mine"]
        assert (mine["status"], mine["provides"]) == ("ok", {"rewards": ["mine"]})
        code = f"import runpy; t = runpy.run_path({str(place / 'tests' / 'test_plugin.py')!r})\n"
        run(venv, "-c", code + "t['test_the_plugin_loads_and_its_reward_works']()", cwd=tmp_path)
    finally:
        pip(venv, "uninstall", "--quiet", "--yes", "toolbrain-mine")


def test_a_tiny_model_learns_through_the_installed_wheels(venv, tmp_path):
    told = run(venv, HERE / "train_tiny.py", tmp_path, cwd=tmp_path)
    figures = json.loads(told.splitlines()[-1])
    assert figures["updates"] > 0
    assert figures["last"] > figures["first"]
