"""`preflight`: what it takes from the compiled step, and what follows from that."""

import itertools
import json
import math
import re

import pytest

from spmd_lm import api
from spmd_lm.analysis.compiled_flops import compiled_flops
from spmd_lm.analysis.topology import parse_topology
from spmd_lm.cli import main
from spmd_lm.cost_model import flops
from spmd_lm.errors import CompilerError, ConfigError
from spmd_lm.parallel.pipeline.schedule import make_schedule
from spmd_lm.planning import preflight as planning
from spmd_lm.planning.audit import audit_step
from spmd_lm.planning.plan_report import plan_on
from spmd_lm.planning.search import make_target
from spmd_lm.plots.pipelines import BACKWARD_TIME
from spmd_lm.plots.timeline import spans
from tests.helpers import make_config

TOPOLOGY = "v5e:2x2"
REFUSAL = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, 40.72G exceeds available HBM (15.75G)"
PRECISION = {"params": "float32", "compute": "bfloat16", "reduce": "float32"}
MODEL = {"layers": 3, "width": 256, "heads": 4, "context": 128, "vocab": 512, "dropout": 0.0, "attention": "xla"}
CONFIG = """
model: {layers: 3, width: 256, heads: 4, context: 128, vocab: 512, dropout: 0, attention_dropout: 0, attention: xla}
data: {source: synthetic}
optim: {lr: 1.0e-3}
parallel: {data: 2, model: 2, zero: 1}
train: {steps: 10, batch: 8}
run: {compilation_cache: none}
"""


pytestmark = pytest.mark.usefixtures("in_this_process")


@pytest.fixture(scope="module")
def config():
    sections = {"model": MODEL | {"attention_dropout": 0.0}, "precision": PRECISION}
    return make_config(**sections, parallel={"data": 2, "model": 2, "zero": 1}, train={"batch": 8, "steps": 10})


@pytest.fixture(scope="module")
def audited(config):
    pytest.importorskip("libtpu", reason="the compiler for TPUs is not installed")
    return audit_step(config, parse_topology(TOPOLOGY))


@pytest.fixture(scope="module")
def found(config, audited):
    """With the step compiled once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planning, "audit_step", lambda *_, **__: audited)
        return planning.preflight(config, make_target(parse_topology(TOPOLOGY)))


def test_memory_and_collectives_are_the_compiler_s(found, audited):
    compiled, memory = audited.report["memory"], found["memory"]
    assert memory["peak"] == max(compiled["peak"], compiled["arguments"]) and found["fits"]
    assert memory["capacity"] == 16 * 2**30 and memory["temporaries"] == compiled["temporaries"]
    assert memory["parameters"] * 2 == memory["optimizer"]  # two moments
    assert memory["parameters"] + memory["optimizer"] == pytest.approx(compiled["arguments"], rel=0.01)
    rows = audited.report["exposed"]["rows"]
    assert [row["bytes"] for row in found["collectives"]] == [row["bytes"] for row in rows]
    assert sum(row["exposed_seconds"] for row in found["collectives"]) == pytest.approx(found["parts"]["exposed"])
    assert {row["link"] for row in found["collectives"]} == {"ICI"} and found["matches_theory"]


def test_a_step_is_the_sum_of_its_parts(found, config):
    assert found["step_seconds"] == pytest.approx(sum(found["parts"].values()))
    assert found["parts"].keys() == {"compute", "exposed", "bubble", "optimizer", "host", "input"}
    assert found["tokens_per_second"] == pytest.approx(8 * 128 / found["step_seconds"])
    model = flops.train_step(config, plan_on(config, parse_topology(TOPOLOGY)))
    assert found["flops"]["model"] == model
    assert found["mfu"] == pytest.approx(model / found["step_seconds"] / 4 / 197e12)


def test_flops_count_every_iteration_of_a_loop(found, audited, config):
    """What the program computes is what its matrices need: more than jax's count, which has one of three layers."""
    assert 0.9 < found["flops"]["hardware"] / found["flops"]["model"] < 1.1
    counted = audited.program.compiled.cost_analysis()["flops"]
    assert compiled_flops(audited.module) > 1.5 * counted
    assert planning.fused_attention_flops(config, audited.program.plan) == 0


def test_attention_in_one_kernel_is_counted_by_formula(config, audited):
    """Of a causal model half: forward, and two and a half times that backward."""
    fused = config.model_copy(update={"model": config.model.model_copy(update={"attention": "splash"})})
    rows, products = 8 // 2 * 128, 2 * 2 * 128 * 256 // 2  # of a device of `data`, and of the heads of one of `model`
    counted = planning.fused_attention_flops(fused, audited.program.plan)
    assert counted == pytest.approx(3 * rows * products * 0.5 * (1 + 2.5))


def test_a_kernel_that_is_not_here_is_named_and_not_counted(config, audited, monkeypatch):
    """What was compiled has another one, in the program itself."""
    fused = config.model_copy(update={"model": config.model.model_copy(update={"attention": "splash"})})
    without = audited._replace(report=audited.report | {"notice": "no cuDNN"})
    monkeypatch.setattr(planning, "audit_step", lambda *_, **__: without)
    found = planning.preflight(fused, make_target(parse_topology(TOPOLOGY)))
    plain = planning.preflight(config, make_target(parse_topology(TOPOLOGY)))
    assert found["flops"] == plain["flops"] and found["memory"] == plain["memory"]
    assert "\nno cuDNN\n" in planning.render(planning.with_costs(found | {"software": 0.9}, None, None))


def test_a_gpu_computes_as_long_as_its_counted_kernels(found, config, audited, monkeypatch):
    """But for the optimizer's, which are a part of their own."""
    counted = audited._replace(report=audited.report | {"memory_traffic": {"seconds": 7.0}})
    monkeypatch.setattr(planning, "audit_step", lambda *_, **__: counted)
    of_gpu = planning.preflight(config, make_target(parse_topology(TOPOLOGY)))
    parts, before = of_gpu["parts"], found["parts"]
    assert parts["compute"] + parts["optimizer"] == pytest.approx(7.0)
    assert [parts[key] for key in ("exposed", "optimizer")] == [before[key] for key in ("exposed", "optimizer")]
    assert of_gpu["step_seconds"] == pytest.approx(sum(parts.values()))
    # The range is of what the cost model computes, whose rates it is about, and has the counted step in it.
    best, worst = found["range"]["step_seconds"]
    assert of_gpu["range"]["step_seconds"] == [min(best, of_gpu["step_seconds"]), max(worst, of_gpu["step_seconds"])]
    last = planning.render(planning.with_costs(of_gpu | {"software": 0.9}, None, None)).splitlines()[-2]
    assert last.endswith("did; compute in the parts of a step is its kernels', counted as audit does")


def test_costs_follow_from_tokens_and_price(found):
    found = found | {"software": 0.9}
    run = planning.with_costs(found, 2.5, 10**9)
    assert run["days"] == pytest.approx(1e9 / found["tokens_per_second"] / 86_400)
    assert run["cost"] == pytest.approx(run["days"] * 24 * 4 * 2.5)
    for key in ("days", "cost", "step_seconds"):
        best, worst = run["range"][key]
        assert best < run[key] < worst and worst / best == pytest.approx(
            run["range"]["tokens_per_second"][0] / run["range"]["tokens_per_second"][1]
        )
    whole = planning.with_costs(found, None, None)
    assert whole["tokens"] == 10 * 8 * 128 and whole["cost"] is None and "at 2.5" not in planning.render(whole)
    best, worst = run["range"]["cost"]
    assert f", {best:.3g} to {worst:.3g} at 2.5 for a device and hour" in planning.render(run)  # below 100
    dear = planning.with_costs(found, 2.5, 10**15)
    best, worst = dear["range"]["cost"]
    assert f", {best:,.0f} to {worst:,.0f} at 2.5" in planning.render(dear)


def test_what_is_told_of_time_and_money_is_a_range(found):
    """Where nobody has measured what products reach."""
    text = planning.render(planning.with_costs(found | {"software": 0.9}, 2.5, 10**12))
    number = r"[\d.,e+-]+"
    step, _, speed, run, last = text.splitlines()[-6:-1]
    assert re.match(rf"step    {number} to {number} s; {number} s of compute", step)
    assert re.fullmatch(rf"speed   {number} to {number} tokens/s, MFU {number}% to {number}%", speed)
    assert re.search(rf"in {number} to {number} days of 4 devices, {number} to {number} at 2.5", run)
    assert last.startswith(
        "if products reach 93% to 47% of the hardware's rate, as published runs of other programs did"
    )


def test_what_was_found_is_not_compiled_again(found, config, tmp_path):
    target, calls = make_target(parse_topology(TOPOLOGY)), []

    def make():
        calls.append(1)
        return found

    first, second = (planning.cached(tmp_path, config, target, make) for _ in range(2))
    assert len(calls) == 1 and second == json.loads(json.dumps(first)) | {"cached": True}
    other = config.model_copy(update={"train": config.train.model_copy(update={"batch": 16})})
    planning.cached(tmp_path, other, target, make)
    planning.cached(tmp_path, config, make_target(parse_topology("v5e:4x4")), make)
    planning.cached(None, config, target, make)
    assert len(calls) == 4


@pytest.mark.parametrize("content", ["damaged", "[]", "3", "null", "{}", '{"fits": true}', None])
def test_a_changed_entry_is_found_again(config, tmp_path, content):
    """None: one bit of what is kept."""
    target, calls = make_target(parse_topology(TOPOLOGY)), []

    def make():
        calls.append(1)
        return {"fits": True}

    planning.cached(tmp_path, config, target, make)
    for path in tmp_path.iterdir():
        entry = path.read_bytes()
        path.write_bytes(entry[:-1] + bytes([entry[-1] ^ 1]) if content is None else content.encode())
    assert planning.cached(tmp_path, config, target, make) == {"fits": True} and len(calls) == 2
    assert planning.cached(tmp_path, config, target, make) == {"fits": True, "cached": True} and len(calls) == 2


def test_the_picture_has_the_seconds_of_a_step():
    parts = {"compute": 3.0, "exposed": 0.5, "bubble": 1.0, "host": 0.0, "optimizer": 0.25}
    for schedule in (make_schedule("1f1b", 4, 8), make_schedule("interleaved", 2, 4, 2), make_schedule("1f1b", 1, 4)):
        for stage in range(schedule.stages):
            found = spans(schedule, stage, parts)
            assert sum(seconds for *_, seconds in found) == pytest.approx(4.75)
            assert all(a + b == pytest.approx(c) for (_, a, b), (_, c, _) in itertools.pairwise(found))
            work = {kind: sum(s for k, _, s in found if k == kind) for kind in ("forward", "backward")}
            assert work["backward"] == pytest.approx(BACKWARD_TIME * work["forward"])


def test_the_command_tells_and_draws(found, config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning, "preflight", lambda *_: found)
    (tmp_path / "run.yaml").write_text(CONFIG)
    picture, line = tmp_path / "step.png", ["preflight", str(tmp_path / "run.yaml"), "--topology", TOPOLOGY]
    assert main([*line, "--price", "1.2", "--picture", str(picture), "--json", str(tmp_path / "found.json")]) == 0
    told, written = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert "fits, with" in told and "matches theory" in told and picture.read_bytes().startswith(b"\x89PNG")
    assert written["fits"] and written["cost"] > 0 and math.isfinite(written["days"])
    assert "of 16.0 GiB per device (" in told
    large = found | {"fits": False, "memory": found["memory"] | {"peak": 20 * 2**30}}
    monkeypatch.setattr(planning, "preflight", lambda *_: large)
    assert main(line) == 1 and "does NOT fit, by 4.0 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "preflight needs hardware"),
        (["--topology", "abacus:8"], "'abacus' is not known"),
        (["--topology", "cpu:8"], "Use spmd-lm bench"),
        (
            ["--topology", TOPOLOGY, "--price", "cheap"],
            "expected dollars for a device and hour, as in 2.5, got 'cheap'",
        ),
        (["--topology", TOPOLOGY, "--price", "-1"], "got '-1'"),
        (["--topology", TOPOLOGY, "--price", "nan"], "got 'nan'"),
        (["--topology", TOPOLOGY, "--tokens", "0"], "expected a number of tokens"),
        (["--topology", TOPOLOGY, "--devices", "4"], "Leave out --devices"),
        (["--topology", TOPOLOGY, "parallel.data=4"], "every device must be used"),
        (["--topology", TOPOLOGY, "--picture", "/nowhere/x.png"], "--picture /nowhere/x.png: cannot be written"),
        (["--topology", TOPOLOGY, "--picture", "x.foo"], "--picture x.foo: its name must end in .png or .svg"),
    ],
)
def test_bad_input_is_refused(tmp_path, capsys, arguments, message):
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert main(["preflight", str(tmp_path / "run.yaml"), *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told


@pytest.mark.parametrize(
    "amount",
    [
        {"price": -1.0},
        {"price": math.nan},
        {"price": "abc"},
        {"price": True},
        {"price": 1e308},
        {"tokens": 0},
        {"tokens": 10**400},
    ],
)
def test_amounts_are_above_zero_in_python_too(amount):
    with pytest.raises(ConfigError, match="give a number above 0"):
        api.preflight(make_config(), TOPOLOGY, **amount)


@pytest.fixture
def refusing(monkeypatch):
    """A compiler that has too little memory for any step."""

    def refuse(*_, **__):
        raise CompilerError(f"the compiler refuses this step: {REFUSAL}.", REFUSAL, out_of_memory=True)

    monkeypatch.setattr(planning, "audit_step", refuse)


def test_what_a_compiler_refuses_for_want_of_memory_does_not_fit(refusing, tmp_path, capsys):
    """As an answer, with the keys of any other; what only a program can tell is null."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    line = ["preflight", str(tmp_path / "run.yaml"), "--topology", TOPOLOGY, "--json", str(tmp_path / "found.json")]
    assert main([*line, "--price", "1.2", "--picture", str(tmp_path / "step.png")]) == 1
    told, written = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert "does NOT fit: planned" in told and REFUSAL in told and f"--search --topology {TOPOLOGY}" in told
    memory = written["memory"]
    assert not written["fits"] and written["refused"] == REFUSAL and written["collectives"] == []
    assert memory["capacity"] == 16 * 2**30 and memory["peak"] == memory["planned"] > memory["parameters"] > 0
    assert written["analytic"]["step_seconds"] > 0 and written["flops"]["model"] > 0 and written["steps"] == 10
    unknown = ("matches_theory", "step_seconds", "range", "parts", "tokens_per_second", "mfu", "days", "cost")
    assert all(written[key] is None for key in unknown) and memory["temporaries"] is None


def test_a_refusal_has_the_keys_of_an_answer(refusing, found, config):
    refused = planning.preflight(config, make_target(parse_topology(TOPOLOGY)))
    assert refused.keys() == found.keys() and refused["memory"].keys() == found["memory"].keys()
    assert refused["memory"]["planned"] == found["memory"]["planned"] and refused["mesh"] == found["mesh"]
    alike = ("bubble", "tokens_per_step", "analytic", "devices")
    assert all(refused[key] == found[key] for key in alike)


def test_another_refusal_is_an_error(config, monkeypatch):
    def refuse(*_, **__):
        raise CompilerError("the compiler refuses this step: no.", "no", out_of_memory=False)

    monkeypatch.setattr(planning, "audit_step", refuse)
    with pytest.raises(CompilerError, match="refuses this step: no"):
        planning.preflight(config, make_target(parse_topology(TOPOLOGY)))


def test_a_dtype_of_unknown_speed_is_told_before_compiling(config, monkeypatch):
    monkeypatch.setattr(planning, "audit_step", lambda *_, **__: pytest.fail("compiled"))
    wide = config.model_copy(update={"precision": config.precision.model_copy(update={"compute": "float64"})})
    with pytest.raises(ConfigError, match="its speed on tpu v5 lite"):
        planning.preflight(wide, make_target(parse_topology(TOPOLOGY)))


def test_python_offers_it(config, found, monkeypatch):
    monkeypatch.setattr(planning, "preflight", lambda *_: found)
    quiet = config.model_copy(update={"run": config.run.model_copy(update={"compilation_cache": "none"})})
    report = api.preflight(quiet, TOPOLOGY, price=1.0)
    assert report["cost"] > 0 and "MFU" in str(report)
