"""Saves appear whole, and replace nothing but an earlier save."""

import json

import pytest

from toolbrain_core.errors import ConfigurationError, ToolBrainError
from toolbrain_core.runs import RunDirectory
from toolbrain_core.saving import check_replaceable, whole_directory


def save(path, text="weights", name="adapter"):
    with whole_directory(path, {"policy": "tiny"}) as folder:
        (folder / name).write_text(text)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_save_lists_its_files_and_is_replaced_by_the_next(tmp_path):
    save(tmp_path / "to" / "saved", name="old")
    save(tmp_path / "to" / "saved", "better")
    assert names(tmp_path / "to") == ["saved"]
    assert names(tmp_path / "to" / "saved") == ["adapter", "toolbrain.json"]
    marker = json.loads((tmp_path / "to" / "saved" / "toolbrain.json").read_text())
    assert marker == {"schema": 1, "policy": "tiny", "files": ["adapter", "toolbrain.json"]}


def test_the_present_folder_can_be_saved_to(tmp_path, monkeypatch):
    save(tmp_path / "saved")
    monkeypatch.chdir(tmp_path / "saved")
    save(".", "better")
    assert (tmp_path / "saved" / "adapter").read_text() == "better"


@pytest.mark.parametrize(
    "marker", [None, "{}", "[]", '{"files": 5}', '{"complete": true}', "torn {"]
)
def test_a_folder_with_anything_else_in_it_is_never_replaced(tmp_path, marker):
    (tmp_path / "config.json").write_text("{}")
    if marker is not None:
        (tmp_path / "toolbrain.json").write_text(marker)
    with pytest.raises(ConfigurationError, match=r"holds other files.*config\.json"):
        save(tmp_path)
    assert (tmp_path / "config.json").exists()


def test_a_run_is_never_replaced_by_a_save(tmp_path):
    directory = RunDirectory.create(tmp_path, "first", {"algorithm": "grpo"})
    checkpoint = directory.checkpoints / "checkpoint-1"
    checkpoint.mkdir()
    directory.complete_checkpoint(checkpoint, 1)
    for path in (directory.path, checkpoint):
        with pytest.raises(ConfigurationError, match="holds other files"):
            save(path)
    assert directory.latest_checkpoint() == (checkpoint, 1)


def test_what_was_added_to_a_save_is_kept(tmp_path):
    save(tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"notes\.txt"):
        check_replaceable(tmp_path / "saved")


def test_a_save_that_fails_is_one_message_and_changes_nothing(tmp_path):
    save(tmp_path / "saved")
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ToolBrainError, match=r"cannot save to .*No space"),
        whole_directory(tmp_path / "saved", {}),
    ):
        raise OSError("No space left on device")
    with pytest.raises(ToolBrainError, match="cannot save to "):
        save(tmp_path / "file" / "saved")
    assert (tmp_path / "saved" / "adapter").read_text() == "weights"
    assert names(tmp_path) == ["file", "saved"]
