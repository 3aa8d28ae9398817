"""What goes wrong before and while a server samples. No vLLM is needed: where a server is, a
stand-in serves in its place."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from toolbrain_vllm.sampler import VllmSampler

from toolbrain_core import Brain
from toolbrain_core.errors import ConfigurationError, NotServed, SamplerFailure, UnknownName
from toolbrain_core.traces import Sampling


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def serve(fake_command) -> Iterator[Callable[[str], tuple[str, subprocess.Popen[bytes]]]]:
    """`serve(kind)`: a stand-in that answers, at its URL; its key is "secret"."""
    started = []

    def start(kind: str) -> tuple[str, subprocess.Popen[bytes]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        env = {**os.environ, "VLLM_API_KEY": "secret"}
        process = subprocess.Popen(fake_command(port, kind), env=env)
        started.append(process)

        def answers() -> bool:
            with socket.socket() as attempt:
                return attempt.connect_ex(("127.0.0.1", port)) == 0

        wait_for(answers)
        return f"http://127.0.0.1:{port}", process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., Any]) -> Any:
    """A policy that the tests give one sampler after the other."""
    return make_policy()


@pytest.fixture
def served(policy: Any, serve: Any) -> Iterator[Callable[..., Any]]:
    """The policy, whose sampler was given a stand-in of some kind, and the stand-in's process."""

    def make(kind: str, **options: Any) -> tuple[Any, subprocess.Popen[bytes]]:
        url, process = serve(kind)
        policy.sampler = VllmSampler(**{"url": url, "api_key": "secret", **options})
        return policy, process

    yield make
    policy.sampler.close()


def ask(policy: Any) -> Any:
    return policy.sampler.generate((1, 2, 3), Sampling(max_new_tokens=4), 0)


# Options ---------------------------------------------------------------------------------------


def test_full_fine_tuning_is_refused_when_the_policy_is_built(make_policy) -> None:
    with pytest.raises(NotServed, match="use lora=…, or sampler='in-process'"):
        make_policy(lora=None, sampler=VllmSampler())


def test_a_sampler_is_chosen_by_its_name(make_agent) -> None:
    agent, options = make_agent(), {"algorithm": "grpo", "progress": False}
    with pytest.raises(UnknownName, match=r"did you mean 'vllm'.*in-process \(toolbrain-transf"):
        Brain(agent, sampler="vlm", **options)
    brain = Brain(agent, sampler="vllm", **options)
    assert isinstance(brain.policy.sampler, VllmSampler)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "http://localhost:8000", "args": ["--seed", "1"]}, "are of a server that is"),
        ({"api_key": "secret"}, "api_key= is of one that runs already"),
        ({"args": "--seed 1"}, "give a list of words"),
        ({"args": ["--port=8000"]}, "--port=8000 is chosen by the sampler"),
        ({"args": ["--api-key", "secret"]}, "--api-key is chosen by the sampler"),
        ({"url": "localhost:8000"}, "must be the root of a server"),
        ({"url": "http://localhost:8000/v1/"}, "without /v1"),
        ({"url": "http://localhost:eighty"}, "must be the root of a server"),
        ({"url": "http://user:secret@localhost:8000"}, "with the key as api_key="),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options, says) -> None:
    with pytest.raises(ConfigurationError, match=says) as refused:
        VllmSampler(**options)
    assert "secret" not in str(refused.value)


def test_one_sampler_for_two_policies_is_refused(served, make_policy) -> None:
    policy, _ = served("good")
    with policy.serving():
        pass
    other = make_policy(sampler=policy.sampler)
    with pytest.raises(ConfigurationError, match="give each Brain one of its own"), other.serving():
        pass


# A server of our own ---------------------------------------------------------------------------


def test_without_vllm_it_says_what_to_install(policy, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    policy.sampler = VllmSampler()
    with pytest.raises(ConfigurationError, match="pip install vllm"), policy.serving():
        pass
    policy.sampler = VllmSampler(python=tmp_path / "python")
    with pytest.raises(ConfigurationError, match="no such program"), policy.serving():
        pass


def test_by_default_it_runs_the_environment_of_the_vllm_on_the_path(
    policy, make_program, monkeypatch, tmp_path
) -> None:
    make_program("echo 'no such device: abacus'; exit 3")
    command = tmp_path / "vllm"
    command.touch()
    command.chmod(0o755)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    policy.sampler = VllmSampler(directory=tmp_path)
    with pytest.raises(SamplerFailure, match="abacus"), policy.serving():
        pass


def test_a_server_that_ends_while_it_starts_fails_with_its_last_words(
    policy, make_program, tmp_path
) -> None:
    broken = make_program("echo 'no such device: abacus' >&2; exit 3")
    policy.sampler = VllmSampler(python=broken, directory=tmp_path / "made")
    with pytest.raises(SamplerFailure, match="ended while it started") as failed, policy.serving():
        pass
    [log] = (tmp_path / "made").glob("*/server-*.log")
    assert str(log) in str(failed.value)
    assert str(failed.value).endswith("no such device: abacus")


def test_a_port_that_somebody_else_took_is_not_mistaken_for_our_server(
    policy, make_program, fake_command, tmp_path
) -> None:
    thief = " ".join(fake_command("$2", "good"))
    program = make_program(
        f"VLLM_API_KEY=theirs {thief} &\nsleep 1.5; echo 'address already in use'; exit 1"
    )
    policy.sampler = VllmSampler(python=program, directory=tmp_path)
    with pytest.raises(SamplerFailure, match="address already in use"), policy.serving():
        pass


def test_a_server_that_never_answers_is_stopped_with_all_that_it_started(
    policy, make_program, tmp_path
) -> None:
    sleeper = make_program(f"sleep 600 &\necho $! > {tmp_path}/pid\nwait")
    policy.sampler = VllmSampler(python=sleeper, startup_seconds=1, directory=tmp_path)
    with pytest.raises(SamplerFailure, match="within 1 seconds"), policy.serving():
        pass
    wait_for(lambda: not is_alive(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_server_and_what_it_started_end_with_the_program(how, tmp_path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "from toolbrain_vllm.server import keep\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may have it ignored
        f"server = 'sleep 600 & echo $$ $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; '\n"
        "kept = keep(['sh', '-c', server + 'wait'], os.environ, sys.stderr.buffer)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        wait_for((tmp_path / "pids").exists)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert all(map(is_alive, pids))
        process.send_signal(how)
        process.wait(60)
        wait_for(lambda: not any(map(is_alive, pids)))
    finally:
        process.kill()
        process.wait()


def test_the_proxies_of_the_environment_do_not_see_a_server_of_our_own(
    policy, make_program, fake_command, monkeypatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    program = make_program(f"exec {' '.join(fake_command('$2', 'good'))}")
    policy.sampler = VllmSampler(python=program)
    with policy.serving():
        assert len(ask(policy).result(60).ids) == 4
    policy.sampler.close()


def test_a_run_that_lost_its_server_goes_on_with_a_new_one_and_no_key_is_written_down(
    make_program, fake_command, lose_and_resume, tmp_path, caplog
) -> None:
    caplog.set_level(logging.DEBUG)
    program = make_program(f"exec {' '.join(fake_command('$2', 'good'))}")
    sampler = VllmSampler(python=program, directory=tmp_path / "made")
    run = lose_and_resume(sampler)
    assert (run.checkpoint / "toolbrain.json").is_file()
    assert str(run.checkpoint) in str(run.failure)
    assert (run.result.steps, run.result.updates) == (4, 4)
    assert [step["attempts_masked"] for step in run.metrics] == [0, 0, 0, 0]

    [log] = [log for log in (tmp_path / "made").glob("*/*.log") if str(log) in str(run.failure)]
    assert len(set(run.keys)) == 2
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    said = [caplog.text, repr(sampler), repr(sampler._server), str(run.failure)]
    for key in run.keys:
        assert not any(key.encode() in data for data in written)
        assert not any(key in text for text in said)

    pid = sampler._server.process.pid
    sampler.close()
    assert not is_alive(pid)
    assert [*log.parent.glob("*.log")] == [log]  # that of the failure


# A server that was given -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("good", {"api_key": "wrong"}, "refuses the API key"),
        ("good", {"api_key": None}, "refuses the API key"),
        ("short", {}, r"holds 16 tokens in a sequence and the policy 1024: .*max_context=16"),
        ("raw", {}, "start it with --logprobs-mode processed_logprobs"),
        ("stranger", {}, r"does not serve the agent's model \(built in memory\).* differ by 1 on"),
        ("refusing", {}, r"refuses /v1/load_lora_adapter: HTTP 404: .*Not Found.*README"),
        ("other", {}, "is not vLLM: .*base"),
        ("page", {}, "is not vLLM: <html>"),
    ],
)
def test_a_server_that_was_started_otherwise_says_how_it_should_be(
    served, kind, options, says
) -> None:
    policy, _ = served(kind, **options)
    with pytest.raises(ConfigurationError, match=says), policy.serving():
        pass


def test_where_no_server_is_the_failure_names_the_address(policy) -> None:
    policy.sampler = VllmSampler(url="http://127.0.0.1:9")
    with pytest.raises(SamplerFailure, match=r"no vLLM server answers at http://127\.0\.0\.1:9"):
        policy.serving().__enter__()


def test_of_the_adapters_that_were_handed_over_only_the_served_one_is_kept(
    served, tmp_path
) -> None:
    policy, _ = served("good", directory=tmp_path)
    with policy.serving():
        [adapter] = tmp_path.glob("*/weights-*")
    with policy.training(), policy.serving():
        [newer] = tmp_path.glob("*/weights-*")
    assert newer != adapter
    policy.sampler.close()
    assert not list(tmp_path.glob("*/weights-*"))


# While it serves -------------------------------------------------------------------------------


def test_a_request_that_fails_alone_is_the_loss_of_one_attempt(served) -> None:
    policy, _ = served("failing")
    with policy.serving():
        with pytest.raises(SamplerFailure, match=r"HTTP 500: .*out of luck"):
            ask(policy).result(60)
        assert policy.sampler.failure is None


def test_a_server_that_no_longer_knows_the_adapter_is_lost(served) -> None:
    policy, _ = served("forgetful")

    def chat() -> None:
        with pytest.raises(SamplerFailure):
            ask(policy).result(60)

    with (
        pytest.raises(SamplerFailure, match=r"was lost: HTTP 404: .*out of luck"),
        policy.serving(),
    ):
        chat()


def test_a_server_that_is_lost_fails_what_is_in_flight_and_ends_serving(served) -> None:
    policy, process = served("silent")
    serving = policy.serving()
    serving.__enter__()
    waiting = ask(policy)
    time.sleep(0.5)  # on its way
    process.kill()
    with pytest.raises(SamplerFailure, match="was lost"):
        waiting.result(60)
    with pytest.raises(SamplerFailure, match="was lost"):
        ask(policy)
    with pytest.raises(SamplerFailure, match="was lost"):
        serving.__exit__(None, None, None)


def test_a_server_that_was_lost_meanwhile_is_seen_before_serving(served) -> None:
    policy, process = served("good")
    with policy.serving():
        pass
    process.kill()
    process.wait()
    with pytest.raises(SamplerFailure, match="does not answer"), policy.serving():
        pass


def test_an_exception_inside_serving_comes_before_the_lost_server(served) -> None:
    policy, process = served("silent")

    def interrupted() -> None:
        process.kill()
        with pytest.raises(SamplerFailure):
            ask(policy).result(60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), policy.serving():
        interrupted()


def test_what_is_in_flight_when_serving_ends_fails(served) -> None:
    policy, _ = served("silent")
    with policy.serving():
        waiting = ask(policy)
        cancelled = ask(policy)
        cancelled.cancel()
    with pytest.raises(SamplerFailure, match="was stopped"):
        waiting.result(0)
    with pytest.raises(CancelledError):
        cancelled.result(0)
    with pytest.raises(SamplerFailure, match="not serving"):
        ask(policy)
