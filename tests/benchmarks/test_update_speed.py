"""The update benchmark: its parts on constructed rows, and whole on a model of a few random weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import update_speed
import yaml
from folders import answered, finished_run, question, trajectory, turn
from update_parts import ours, padded, sweep, trl
from update_parts.measures import MatmulRate, fastest, matmul_flops, peak_in_child, peak_increase
from update_parts.rows import built_rows, copies, length, load_rows, made_rows, save_rows, spread, stored_rows

from midflight.agent.types import Generation
from midflight.building import local_engine
from midflight.engines.base import FinishReason
from midflight.engines.local import LoadedModel
from midflight.errors import UserError
from midflight.recipe import load_recipe, resolved
from midflight.store import NewTrajectory, RunFolder, Store
from midflight.training.packing import Row, pack_rows
from tests.training.tiny import make_tiny_model

GRAMMAR = 'start: " " ("add: " /[0-9+ ]{1,12}/ | "finish") "\\n"\n'


def row(prompt, ids, forced=None, **changes):
    made = Row(
        prompt_ids=tuple(prompt),
        ids=tuple(ids),
        logprobs=(-1.0,) * len(ids),
        forced=tuple(forced or (False,) * len(ids)),
        temperature=1.0,
        grammar=None,
        advantage=1.0,
        weight=0.25,
    )
    return replace(made, **changes)


def test_micro_batches_go_by_length_and_count_their_padding():
    rows = [row([1] * size, [2, 3]) for size in (5, 1, 3)]
    assert [[length(one) for one in part] for part in padded.batches(rows, 2)] == [[3, 5], [7]]
    assert padded.padded_tokens(padded.batches(rows, 2)) == 2 * 4 + 6
    assert padded.padded_tokens([rows[:2], rows[2:]]) == 2 * 6 + 4


def test_the_sample_is_spread_over_the_lengths():
    rows = [row([1] * size, [2]) for size in (9, 4, 2, 6, 1, 8, 3, 7)]
    assert [length(one) - 1 for one in spread(rows, 4)] == [2, 4, 7, 9]
    assert [length(one) - 1 for one in spread(rows, 9)] == [1, 2, 3, 4, 6, 7, 8, 9]


def test_copies_share_the_trunk_alone_and_are_as_large_each():
    rows = [row([1, 2, 3, 4], [7, 8]), row([1, 2, 5], [7, 9]), row([1, 2, 3], [7])]
    one = pack_rows(rows, 1000)
    three = pack_rows(copies(rows, 3), 1000)
    assert copies(rows, 3)[:3] == rows
    assert three.unique_tokens - 2 == 3 * (one.unique_tokens - 2)
    assert [(a.ids, length(a)) for a in copies(rows, 3)[3:6]] == [(b.ids, length(b)) for b in rows]


def test_rows_survive_the_way_to_another_process(tmp_path):
    rows = [row([1, 2], [3], supports=((3, 4),)), row([1], [2, 3], [False, True], grammar="x")]
    save_rows(rows, tmp_path / "rows")
    assert load_rows(tmp_path / "rows") == rows


def test_loss_is_the_clipped_ratio_times_advantage():
    rows = [row([1], [2, 3, 4], [False, True, False]), row([1], [2], advantage=-2.0, weight=0.5)]
    logprobs = torch.tensor([-1.0, -0.5, -1.0 + 0.3], requires_grad=True)
    value = padded.loss(logprobs, rows, 0.2)
    ratio = torch.tensor(0.3).exp().item()
    assert value.item() == pytest.approx(-(0.25 * 1.0 + 0.25 * 1.2 + 0.5 * -2.0 * ratio))
    value.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.25, 0.0, 0.5 * 2.0 * ratio])


def test_flops_are_those_of_the_products_that_run():
    first, second = torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 3)
    second.weight.requires_grad_(False)

    def run():
        second(first(torch.ones(7, 6))).sum().backward()

    # 7 tokens: forward of both; back to the first's weight, and through the second to its input
    assert matmul_flops(run) == 2 * 7 * (6 * 5 + 5 * 3) + 2 * 7 * 6 * 5 + 2 * 7 * 5 * 3


def test_the_fastest_is_that_with_the_best_round():
    timings = {2: iter([5.0, 4.0]), 4: iter([9.0, 3.0]), 8: iter([4.5, 4.5])}
    assert fastest({size: lambda size=size: next(timings[size]) for size in timings}) == 4
    assert fastest({8: lambda: pytest.fail("nothing to choose")}) == 8


def test_a_round_compares_a_peer_with_ours_just_before_it():
    mine, rates = iter([1.0, 2.0, 4.0, 5.0]), iter([10.0, 30.0] * 4)
    rounds = update_speed.Rounds(lambda: next(mine), lambda: next(rates), 40.0)
    for way, taken in (("padded", [3.0, 8.0]), ("trl", [16.0, 50.0])):
        rounds.time(way, iter(taken).__next__, 2)
    assert rounds.seconds == {"ours": [1.0, 2.0, 4.0, 5.0], "padded": [3.0, 8.0], "trl": [16.0, 50.0]}
    assert rounds.ratios == {"padded": [3.0, 4.0], "trl": [4.0, 10.0]}
    assert rounds.shares == [2.0, 1.0, 0.5, 0.4] and rounds.rates == [20.0] * 4
    assert (rounds.speedup("padded"), rounds.speedup("trl"), rounds.speedup("trl_bfloat16")) == (3.5, 7.0, None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--repeats", "0"], "argument --repeats: 0 is not a whole number of at least 1"),
        (["--micro-batches", "4", "x"], "argument --micro-batches: x is not a whole number of at least 1"),
        (["--speed"], "unrecognized arguments: --speed"),
        (["--peers", "verl"], "argument --peers: invalid choice: 'verl'"),
        (["--run", "somewhere"], "--run and --step: give both, or neither to make the rows now"),
        (["--run", "examples", "--step", "1"], "examples: "),
        (["training.pack_token=3"], "training.pack_token"),
        (
            ["model.lora=null", "--run", "RUN", "--step", "1"],
            "model.lora: this benchmark compares updates of an adapter",
        ),
        (["--run", "RUN", "--step", "3"], "--step 3: not a step of"),
        (["--run", "RUN", "--step", "2"], "--step 2: no group of it has signal"),
        (
            ["--run", "RUN", "--step", "1", "--trl-python", "/no/python"],
            "--trl-python /no/python: cannot be run (No such",
        ),
    ],
)
def test_bad_arguments_are_one_line(given, says, stored, capsys):
    try:
        code = update_speed.main([str(stored) if word == "RUN" else word for word in given])
    except SystemExit as stopped:
        code = stopped.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert says in printed.err and printed.err.count("\n") == 1


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run folder: step 1 asked one question twice, with two and three trajectories; step 2 has no signal."""

    def drawn(ids):
        return Generation("x", FinishReason.STOP, (1, 5, 6), ids, (-0.5,) * len(ids), (False,) * len(ids), grammar=None)

    task = question("q")
    evaluated = [answered(task, 1.0)]
    folder = finished_run(tmp_path_factory.mktemp("run") / "quickstart-seed0", evaluated, evaluated)
    with Store(RunFolder(folder).store) as store:
        for step, groups in ((1, ((1.0, 0.0), (1.0, 0.0, 0.0))), (2, ((0.0, 0.0),))):
            store.add_trajectories(
                store.runs()[-1].id,
                [
                    NewTrajectory(
                        phase="train",
                        step=step,
                        group=task.id,
                        member=member,
                        task=task,
                        trajectory=trajectory(
                            *(
                                replace(turn(1 + index, "capital"), generation=drawn((7 + member, 9)))
                                for index in range(2)
                            )
                        ),
                        reward=reward,
                    )
                    for rewards in groups
                    for member, reward in enumerate(rewards)
                ],
            )
    return folder


def test_a_stored_step_gives_the_rows_that_trained(stored):
    rows = stored_rows(stored, 1, load_recipe("quickstart").training)
    assert [one.ids[0] for one in rows] == [7, 7, 8, 8, 7, 7, 8, 8, 9, 9]
    high, low = 2**0.5, -(0.5**0.5)
    assert [one.advantage for one in rows] == pytest.approx([1, 1, -1, -1, high, high, low, low, low, low])
    # groups, trajectories of the group, turns, tokens
    assert [one.weight for one in rows] == pytest.approx([1 / (2 * 2 * 2 * 2)] * 4 + [1 / (2 * 3 * 2 * 2)] * 6)
    assert {one.prompt_ids for one in rows} == {(1, 5, 6)}


def test_a_step_whose_advantages_hold_a_kl_that_is_not_stored_is_refused(stored):
    recipe = load_recipe("quickstart", ["training.kl_beta=0.1", "training.kl_in=reward"])
    for asked in (lambda: stored_rows(stored, 1, recipe.training), lambda: made_rows(recipe)):
        with pytest.raises(UserError) as refused:
            asked()
        assert str(refused.value) == (
            "training.kl_in = reward: advantages hold the KL to the reference, which is not stored; name a run or a "
            "recipe with training.kl_in=loss"
        )


model = pytest.mark.model
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a call")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return load_recipe("quickstart", [f"model.name={folder}", "model.device=cpu", "training.pack_tokens=96"])


@pytest.fixture(scope="module")
def bench(recipe):
    return ours.load_bench(recipe)


@pytest.fixture(scope="module")
def few(bench):
    """Rows under a grammar, some of whose tokens are forced, at temperature 1.2; the last with truncated sampling."""
    tokenizer = bench.policy.tokenizer
    made = []
    for number, text in enumerate((" add: 1 + 2\n", " finish\n", " add: 34\n", " finish\n")):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = tokenizer(f"Tools: add. Question: {'1 + ' * (number % 3)}2?\nTurn 1:", add_special_tokens=False)[
            "input_ids"
        ]
        forced = [position == len(ids) - 1 for position in range(len(ids))]
        sign = 1.0 if number % 2 else -1.5
        made.append(row(prompt, ids, forced, grammar=GRAMMAR, temperature=1.2, advantage=sign, weight=0.1))
    cut = replace(made[0], grammar=None, supports=tuple((token, 100, 200) for token in made[0].ids))
    return ours.on_policy(bench, [*made, cut])


@model
def test_padded_gradients_are_those_of_the_update(bench, few):
    noisy = [replace(one, logprobs=tuple(value + 0.3 for value in one.logprobs)) for one in few]
    ours.packed_update(bench, noisy, max_grad_norm=1e9, max_drift=1e9)
    expected = bench.gradients()
    assert expected.norm() > 0
    for size, using in ((1, bench.merged), (2, bench.merged), (4, bench.unmerged)):
        padded.padded_update(bench, noisy, size, using, 1e9)
        assert float((bench.gradients() - expected).norm() / expected.norm()) < 1e-5
    before = [parameter.detach().clone() for parameter in bench.policy.parameters()]
    padded.padded_update(bench, noisy, 2, bench.merged, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, bench.policy.parameters(), strict=True))


@model
def test_on_policy_ratios_are_one(bench, few):
    with torch.no_grad():
        scores = padded.score(bench.policy.causal, bench.masks, few)
    free = [value for one in few for value, forced in zip(one.logprobs, one.forced, strict=True) if not forced]
    assert scores.tolist() == pytest.approx(free, abs=1e-5)


@model
def test_a_wrong_gradient_stops_before_anything_is_timed(bench, few, monkeypatch):
    monkeypatch.setattr(padded, "loss", lambda logprobs, rows, epsilon: -1.001 * logprobs.sum())
    with pytest.raises(UserError, match="gradients of padded are .* nothing timed"):
        update_speed.checked_gaps(bench, few, 2)


@model
def test_flops_of_a_merged_update_follow_the_formula(bench, few):
    single = [few[0]]
    tokens = length(single[0]) - 1
    free = single[0].forced.count(False)
    maps = [part.weight.shape for part in bench.sampler.get_decoder().modules() if isinstance(part, torch.nn.Linear)]
    rank = bench.policy.peft.peft_config["default"].r
    head = 2 * 2 * free * 49152 * 32
    body = sum(4 * tokens * m * n + 4 * tokens * rank * (m + n) for m, n in maps)
    first = sum(2 * tokens * m * n for m, n in maps[:3])  # the embeddings need no gradient: none back to their input
    counted = matmul_flops(lambda: padded.padded_update(bench, single, 1, bench.merged, 1e9))
    assert counted == head + body - first
    assert MatmulRate(bench.sampler, 10).flops == sum(4 * 10 * m * n for m, n in maps)


@model
def test_built_rows_have_the_sizes_asked_for(recipe, bench):
    loaded = LoadedModel("tiny", bench.sampler, bench.policy.tokenizer, bench.policy.device)
    engine = local_engine(recipe, loaded)
    try:
        rows = built_rows(recipe, engine, queries=2, group=3, turns=3, result_tokens=20)
        longer = built_rows(recipe, engine, queries=2, group=3, turns=3, result_tokens=50)
    finally:
        engine.close()
    assert len(rows) == 2 * 3 * 3
    assert {one.forced.count(False) for one in rows} == {3}
    assert sum(one.weight * one.forced.count(False) for one in rows) == pytest.approx(1.0)
    grown = [len(b.prompt_ids) - len(a.prompt_ids) for a, b in zip(rows, longer, strict=True)]
    assert grown[:3] == [0, 30, 60]


@linux
def test_the_peak_is_that_of_the_call_and_not_of_what_was_before_it():
    bytearray(400_000_000)
    loaded, peak = peak_increase(lambda: bytearray(b"x") * 200_000_000)
    assert 0.195 < peak < 0.25 and loaded > 0.05


@linux
@model
def test_the_peak_of_an_update_is_measured_in_a_process_of_its_own(recipe, few, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(resolved(recipe)))
    save_rows(few, tmp_path / "rows")
    spec = {"recipe": str(tmp_path / "recipe.yaml"), "rows": str(tmp_path / "rows"), "copies": 2, "pack_tokens": 96}
    found = peak_in_child({**spec, "micro_batch": None}, tmp_path)
    logits = 10 * 49152 * 4 / 1e9  # of a row or so; several such arrays live at once
    assert logits < found["peak_gb"] < 0.5 < found["loaded_gb"] + 0.3
    with pytest.raises(UserError, match="measuring memory failed: .*KeyError: 'copies'"):
        peak_in_child({name: value for name, value in spec.items() if name != "copies"}, tmp_path)


def fake_peak(spec, folder):
    assert load_rows(Path(spec["rows"])) and load_recipe(spec["recipe"]).training.pack_tokens == 96
    if spec["micro_batch"] is not None:
        return {"loaded_gb": 1.0, "peak_gb": 1000.0 * spec["micro_batch"]}
    return {"loaded_gb": 1.0, "peak_gb": spec["pack_tokens"] + spec["copies"] / 10}


@model
def test_json_has_every_figure_and_null_for_a_peer_that_is_not_there(recipe, few, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(trl.VARIABLE, raising=False)
    monkeypatch.setattr(update_speed, "rows_for", lambda options: (recipe, few))
    monkeypatch.setattr(update_speed, "peak_in_child", fake_peak)
    assert update_speed.main(["--json", "--repeats", "2", "--micro-batches", "2", "4"]) == 0
    printed = capsys.readouterr()
    assert trl.INSTALL in printed.err
    found = json.loads(printed.out)
    assert found["speedup_vs_padded"] > 0 and found["speedup_vs_plain_peft"] > 0
    assert [found[f"speedup_vs_{way}"] for way in trl.WAYS] == [None] * 3
    batch = pack_rows(few, 96)
    assert (found["total_tokens"], found["unique_tokens"]) == (batch.total_tokens, batch.unique_tokens)
    assert found["rows"] == 5 and found["padded_tokens"]["trl"] is None
    assert 0 < found["share_of_matmul_rate"] and found["gflop"] > 0 and found["matmul_gflops"] > 0
    assert set(found["micro_batch"]) == {"padded", "plain_peft"} and set(found["micro_batch"].values()) <= {2, 4}
    assert {way: len(taken) for way, taken in found["seconds"].items()} == {"ours": 4, "padded": 2, "plain_peft": 2}
    assert max(found["gradient_gap"].values()) < 1e-5
    assert (found["peak_gb"], found["peak_gb_padded"]) == (96.1, 1000.0 * found["micro_batch"]["padded"])
    assert [(one["pack_tokens"], one["batch"], one["peak_gb"]) for one in found["peak_gb_by_pack"]] == [
        (96, 1, 96.1), (96, 4, 96.4), (192, 1, 192.1), (192, 4, 192.4),
    ]  # fmt: skip
    text = update_speed.render(found)
    assert "5 rows" in text and "packs of 192, 4 x the rows: 192.40 GB" in text
    assert update_speed.main(["--json", "--repeats", "1", "--micro-batches", "2", "--no-memory", "--peers", "trl"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["speedup_vs_plain_peft"] is None and found["seconds"].keys() == {"ours", "padded"}
    assert f"{found['speedup_vs_padded']:.2f} x\n" in printed.err


@model
def test_sweep_varies_one_size_at_a_time_and_draws(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "BASE", {"group": 2, "turns": 1, "result_tokens": 4})
    monkeypatch.setattr(sweep, "VARIED", {"group": (2, 3), "turns": (1, 2), "result_tokens": (4,)})
    plot = tmp_path / "plots" / "speed.png"
    given = [
        f"model.name={recipe.model.name}",
        "--sweep",
        "--repeats",
        "1",
        "--micro-batches",
        "4",
        "--plot",
        str(plot),
    ]
    assert update_speed.main([*given, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["sweep"]
    assert [(one["varied"], one["value"], one["rows"]) for one in points] == [
        ("group", 2, 4), ("group", 3, 6), ("turns", 1, 4), ("turns", 2, 8), ("result_tokens", 4, 4),
    ]  # fmt: skip
    assert points[0]["ours"] == points[2]["ours"]  # the same sizes are measured once
    assert plot.read_bytes().startswith(b"\x89PNG")


@model
def test_rows_can_be_made_by_the_recipe_itself(recipe):
    with pytest.raises(UserError, match="--step 1: no group of it has signal"):
        made_rows(
            recipe.model_copy(
                update={"training": recipe.training.model_copy(update={"queries_per_step": 1, "group_size": 2})}
            )
        )


@model
def test_trl_process_that_fails_says_why(recipe, few, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no trl here' >&2\nexit 3\n")
    broken.chmod(0o755)
    assert trl.find_python(str(broken)) is None
    with (
        pytest.raises(UserError, match="TRL's process failed: no trl here"),
        trl.trl_update(Path(broken), recipe, few, 2, "trl", tmp_path) as (_, step),
    ):
        step()
