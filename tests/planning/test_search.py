"""The search over layouts, against enumeration by the configuration's own checks and plans made one by one."""

import dataclasses
import functools
import itertools
import json
import random
from collections import Counter

import pytest

import spmd_lm
from spmd_lm import api
from spmd_lm.analysis.topology import parse_topology
from spmd_lm.axes import MESH_AXES
from spmd_lm.cli import main
from spmd_lm.config import checks, layout_checks
from spmd_lm.config.load import load
from spmd_lm.config.schema import Run
from spmd_lm.cost_model import memory
from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.step_time import OURS, predict_step
from spmd_lm.errors import CompilerError, ConfigError, LayoutError
from spmd_lm.planning import search_report
from spmd_lm.planning.plan_report import plan_on
from spmd_lm.planning.search import POLICIES, REASONS, Search, candidates, make_target, make_targets, search
from spmd_lm.resolve import abstract_plan
from tests.deaths import fail, read_nowhere
from tests.helpers import make_config

PRECISION = {"params": "float32", "compute": "bfloat16", "reduce": "float32"}


def gpt(width=1024, layers=12, batch=16, **sections):
    model = {"layers": layers, "width": width, "heads": 12, "context": 256, "vocab": 512, "dropout": 0.0}
    model |= {"attention_dropout": 0.0, "heads": 8}
    return make_config(model=model, precision=PRECISION, train={"batch": batch}, **sections)


@pytest.fixture(scope="module")
def found() -> Search:
    return search(gpt(), [make_target(parse_topology("h100:2x4"))])


def key(config) -> tuple:
    p = config.parallel
    layout = (p.pipe, p.replica, p.data, p.model, p.sequence, p.zero, p.schedule, p.chunks, p.microbatches)
    return (*layout, p.reduce_once, config.remat.policy)


def test_experts_have_an_axis_of_degrees_that_divide_them():
    target = make_target(parse_topology("h100:1x8"))

    def degrees(**model) -> set[int]:
        config = gpt(width=64, layers=4, batch=8)
        config = config.model_copy(update={"model": make_config(model=config.model.model_dump() | model).model})
        listed = [each for variants in candidates(config, target, Counter()) for each in variants]
        return {each.parallel.expert for each in listed}

    assert degrees() == {1}
    assert degrees(mlp={"kind": "moe", "experts": 12}) == {1, 2, 4}


def test_candidates_are_those_that_the_checks_allow():
    """Of all combinations, without those that change nothing."""
    config, target = gpt(width=64, layers=4, batch=8), make_target(parse_topology("h100:1x8"))
    listed = {key(each) for variants in candidates(config, target, Counter()) for each in variants}
    allowed = set()
    degrees = (1, 2, 4, 8)
    schedules = [("1f1b", 1), *(("interleaved", n) for n in (2, 4)), *(("breadth_first", n) for n in (1, 2, 4))]
    for pipe, replica, data, model in itertools.product(degrees, repeat=4):
        if pipe * replica * data * model != 8:
            continue
        for zero, sequence, count, (schedule, chunks), once, policy in itertools.product(
            range(4), (False, True), (1, 2, 4, 8), schedules, (False, True), POLICIES
        ):
            changes_nothing = (
                (zero and data == 1)
                or (replica > 1 and not zero)
                or (sequence and model == 1)
                or (once and (zero < 2 or count == 1))
                or (pipe == 1 and (schedule, chunks) != ("1f1b", 1))
            )
            if changes_nothing:
                continue
            update = {"pipe": pipe, "replica": replica, "data": data, "model": model, "zero": zero, "chunks": chunks}
            update |= {"sequence": sequence, "microbatches": count, "schedule": schedule, "reduce_once": once}
            parallel = config.parallel.model_copy(update=update)
            remat = config.remat.model_copy(update={"policy": policy})
            run = config.run.model_copy(update={"simulate_devices": 8})
            each = config.model_copy(update={"parallel": parallel, "remat": remat, "run": run})
            sections = {name: getattr(each, name) for name in type(each).model_fields}
            if not checks.problems(sections):
                allowed.add(key(each))
    assert len(allowed) > 1000 and listed == allowed


def test_every_check_of_layouts_is_asked():
    """But for those of keys that the search sets itself, to what they allow."""
    by_construction = {
        layout_checks.remat_blocks_divide_chunk,
        layout_checks.pipelines_do_not_offload,
        layout_checks.schedule_has_chunks,
        layout_checks.data_degree_is_not_zero,
    }
    assert REASONS.keys() | by_construction == set(layout_checks.CHECKS) and not REASONS.keys() & by_construction


def test_figures_are_those_of_plans_made_one_by_one(found):
    assert len(found.layouts) > 2000 and len({key(layout.config) for layout in found.layouts}) == len(found.layouts)
    for layout in random.Random(0).sample(found.layouts, 100):
        config, target = layout.config, layout.target
        plan = abstract_plan(config, 8, "gpu", target.topology.device_kind)
        assert layout.memory == sum(memory.table(config, plan).values())
        assert layout.bytes == sum(row.bytes for row in expected_collectives(config, plan))
        step = predict_step(config, plan, target.hardware, OURS)
        assert (layout.seconds, layout.parts) == (step.seconds, step.parts)


def test_the_fastest_is_the_fastest_that_fits(found):
    assert {layout.overrides["offload"] for layout in found.layouts} == {"none"}
    best = found.fastest()
    assert best.room >= 0 and all(best.seconds <= each.seconds for each in found.layouts if each.room >= 0)
    pareto = found.pareto()
    assert pareto[0] == best and len(pareto) > 3
    for one, other in itertools.permutations(pareto, 2):
        assert one.seconds < other.seconds or one.memory < other.memory
    for each in found.fitting:
        assert any(one.seconds <= each.seconds and one.memory <= each.memory for one in pareto)


def test_alternatives_say_what_another_choice_costs(found):
    best = found.fastest()
    for each in search_report.alternatives(found, best):
        assert each["value"] != best.overrides[each["key"]]
        others = [layout for layout in found.fitting if layout.overrides[each["key"]] != best.overrides[each["key"]]]
        assert each["slower"] == pytest.approx(min(layout.seconds for layout in others) / best.seconds - 1)


def test_the_text_says_what_it_rests_on_and_has_every_topology():
    """Two chips of v5e are slower than eight GPUs, and have no more memory to spare."""
    targets = [make_target(parse_topology(topology)) for topology in ("h100:1x8", "v5e:2x1")]
    found = search(gpt(batch=8), targets)
    description = search_report.describe(found, *search_report.confirmed_best(found, 0, api.audit))
    text = search_report.render(description)
    assert "v5e:2x1" in text and "products reach 90% of the hardware's rate" in text
    fastest = [each["step_seconds"] for each in description["by_topology"]]
    assert fastest == sorted(fastest) and len(fastest) == 2
    lines = text.split("otherwise\n")[1].split("\nassumes")[0].splitlines()
    layouts = [line.rsplit(": ", 1)[1] for line in lines]
    assert len(set(layouts)) == len(layouts) < len(description["alternatives"])  # choices of one layout are on one line


@pytest.mark.parametrize(("topologies", "top"), [([], 1), (["h100:1x2"], -1)])
def test_a_search_in_python_refuses_what_the_command_does(topologies, top):
    with pytest.raises(ConfigError, match="needs a topology, and top of 0 or more"):
        spmd_lm.search_layouts(gpt(), topologies, top=top)


def test_the_rule_of_thumb_takes_no_more_model_parallelism_than_fits():
    """1.3B do not fit on one device of 16 GiB without ZeRO's third stage; on two they do."""
    target = make_target(parse_topology("v5e:2x2"))
    found = search(gpt(width=2048, layers=24, batch=4), [target])
    rule = search_report.follow_the_rule(found).overrides
    assert rule["zero"] <= 1 and rule["replica"] == 1
    smaller = [each for each in found.fitting if each.overrides["zero"] <= 1 and each.overrides["replica"] == 1]
    degrees = [each.overrides["model"] * each.overrides["pipe"] for each in smaller]
    assert rule["model"] * rule["pipe"] == min(degrees) and rule["pipe"] == 1


def test_more_hardware_is_compared():
    both = search(gpt(batch=4), [make_target(parse_topology(topology)) for topology in ("h100:1x2", "h100:1x4")])
    assert {layout.target.topology.size for layout in both.layouts} == {2, 4}
    assert {layout.target.topology.size for layout in both.pareto()} == {2, 4}


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (
            "cpu:6",
            r"its speed is not known .* `spmd-lm bench CONFIG --devices 6 --calibrate FILE`, and add --hardware FILE",
        ),
        ("2*v4:2x2x1", "between slices is not known. Name one slice"),
    ],
)
def test_hardware_of_unknown_speed_is_refused(topology, message):
    with pytest.raises(ConfigError, match=message):
        make_target(parse_topology(topology))


@pytest.mark.parametrize("topology", ["h100:1x8", "v5e:2x2"])
def test_a_dtype_of_unknown_speed_is_refused(topology):
    config = make_config(precision={"params": "float64", "compute": "float64", "reduce": "float64"})
    message = (
        rf"precision.compute=float64: its speed on .* \(--topology {topology}\) is not known. Use bfloat16 or float16 "
    )
    with pytest.raises(ConfigError, match=message):
        search(config, [make_target(parse_topology(topology))])


@pytest.mark.parametrize("topologies", ["h100:1x1 a100:1x1", "a100:1x1 h100:1x1"])
def test_matmuls_that_one_of_the_devices_has_not_are_refused(topologies):
    """Whatever was found for the others before."""
    config = make_config(precision=PRECISION | {"matmul": "fp8"})
    with pytest.raises(ConfigError, match=r"fp8: .*A100.* has no matmuls of float8. Use precision.matmul=int8, or"):
        search(config, [make_target(parse_topology(each)) for each in topologies.split()])


def test_what_does_not_fit_says_by_how_much():
    target = make_target(parse_topology("v5e:2x2"))
    message = r"none of [\d,]+ layouts fits: the smallest takes [\d.]+ GiB of 14.7 on v5e:2x2"
    with pytest.raises(ConfigError, match=message):
        search(gpt(width=4096, layers=64, batch=4), [target]).fastest()


@pytest.mark.slow
def test_the_hosts_memory_is_searched_where_nothing_else_fits():
    """Activations first, then masters and moments; and these not where no matrix is trained."""
    target = make_target(parse_topology("v5e:2x2"))
    large = search(gpt(width=4096, layers=24, batch=4), [target])
    fastest = large.fastest()
    assert fastest.overrides["offload"] == "host" and "offload=host" in search_report._layout(fastest.overrides)
    assert all(layout.overrides["offload"] == "host" for layout in large.fitting)
    assert {layout.config.remat.policy for layout in large.layouts if layout.room < 0} == {*POLICIES, "offload"}
    assert large.rejected["does not fit"] == len(large.layouts) - len(large.fitting)
    vectors = search(gpt(width=4096, layers=64, batch=4, adapter={"kind": "ia3"}), [target])
    assert not vectors.fitting and {layout.overrides["offload"] for layout in vectors.layouts} == {"none"}
    for layout in random.Random(0).sample(large.layouts, 20):
        there = layout.config.model_copy(update={"run": Run(simulate_devices=4)})
        assert not checks.problems(dict(there)), layout.overrides


def test_a_layout_fits_its_host_too():
    """5B parameters have 13.5 GiB of masters and moments for each of four devices."""
    target = make_target(parse_topology("v5e:2x2"))
    assert target.hardware.host_memory == 384 * 2**30 / 8
    small = dataclasses.replace(target.hardware, host_memory=14 * 2**30)
    found = search(gpt(width=4096, layers=24, batch=4), [target._replace(hardware=small)])
    assert not found.fitting and max(layout.device_room for layout in found.layouts) > 0
    with pytest.raises(ConfigError, match=r"smallest takes 13.5 GiB of its host's memory for a device, .* is 12.9, on"):
        found.fastest()


def test_secondary_copies_without_a_border_of_hosts_have_their_own_reason():
    config = gpt(width=64, layers=4, batch=8, parallel={"zero": 3, "secondary": "within_host"})
    found = search(config, make_targets([parse_topology("h100:1x8")]))
    assert not found.layouts and "parameters are not divisible" not in found.rejected
    assert found.rejected["parallel.secondary without a border of hosts within data"]


@pytest.mark.parametrize("batch", [9, 12, 65])
def test_no_layout_is_searched_that_a_run_refuses(batch):
    """Where devices, or microbatches, do not divide the batch."""
    for each in search(gpt(width=64, layers=4, batch=batch), make_targets([parse_topology("h100:1x8")])).layouts:
        there = each.config.model_copy(update={"run": Run(simulate_devices=8)})
        assert not checks.problems(dict(there)), each.overrides


@pytest.mark.parametrize("patterns", ["zzz", "*"])
def test_a_search_refuses_what_nothing_can_train(patterns):
    with pytest.raises(ConfigError, match=r"optim\.freeze"):
        search(gpt(optim={"freeze": patterns}), make_targets([parse_topology("h100:1x8")]))


def test_a_topology_is_searched_once():
    assert len(make_targets(parse_topology(name) for name in ("h100:1x8", "v5e:2x2", "h100:1x8"))) == 2


def test_a_batch_that_no_layout_divides_is_told():
    config = gpt(batch=3, layers=7)
    one_head = config.model.model_copy(update={"heads": 1})
    with pytest.raises(
        ConfigError,
        match=r"no layout is legal on v5e:4x4: .* the batch is not divisible.* another number of devices",
    ):
        search(config.model_copy(update={"model": one_head}), [make_target(parse_topology("v5e:4x4"))]).fastest()


CONFIG = """
model: {layers: 4, width: 256, heads: 8, context: 128, vocab: 512, dropout: 0, attention_dropout: 0}
data: {source: synthetic}
optim: {lr: 1.0e-3}
train: {steps: 10, batch: 16}
"""


def test_the_command_writes_a_run_that_plans(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG)
    out, found = tmp_path / "best.yaml", tmp_path / "found.json"
    line = ["plan", str(tmp_path / "run.yaml"), "--search", "--topology", "h100:1x8", "--top", "0"]
    assert main([*line, "--out", str(out), "--json", str(found)]) == 0
    result = json.loads(found.read_text())
    assert result["evaluated"] > 1000 and result["pareto"][0] == result["best"] and result["compiled"] == []
    assert result["rejected"].keys() and result["seconds"] > 0 and "best " in capsys.readouterr().out
    best = load(out)
    assert {name: getattr(best.parallel, name) for name in ("pipe", "data", "model", "zero")}.items() <= (
        result["best"]["layout"].items()
    )
    with pytest.raises(LayoutError):
        abstract_plan(best, 7, "gpu", "")
    assert main(["plan", str(out), "--topology", "h100:1x8", "--json", str(found)]) == 0
    plan = json.loads(found.read_text())
    assert (plan["topology"], plan["platform"], plan["devices"]) == ("h100:1x8", "gpu", 8)
    assert sum(plan["memory"].values()) < plan["capacity"] == 0.75 * plan["device_memory"] and plan["remedy"] is None
    assert "of the 59.3 GiB that jax allocates of the 79.1 GiB of a device\n" in capsys.readouterr().out
    assert sum(plan["memory"].values()) == result["best"]["memory"]


@pytest.mark.parametrize(("topology", "largest"), [("2*v5e:2x2", 4), ("h100:2x6", 2)])
def test_a_search_finds_only_what_a_run_takes(topology, largest):
    """Replicas alone are between TPU slices, and `model` divides a host's devices, whose number it need not be."""
    target = make_target(parse_topology(topology))
    layouts = search(gpt(layers=2, batch=12), [target]).layouts
    assert max(each.config.parallel.model for each in layouts) == largest
    assert {each.config.parallel.replica % target.topology.slices for each in layouts} == {0}
    assert any(each.config.parallel.zero == 0 for each in layouts)
    for each in random.Random(0).sample(layouts, 20):
        plan_on(each.config, target.topology)


def test_only_what_a_search_wrote_is_replaced(tmp_path, capsys, monkeypatch):
    run, out, other = tmp_path / "run.yaml", tmp_path / "best.yaml", tmp_path / "other.yaml"
    run.write_text(CONFIG)
    other.write_text(CONFIG)
    line = ["plan", str(run), "--search", "--topology", "h100:1x2", "--top", "0", "--out"]
    assert main([*line, str(out)]) == 0 and main([*line, str(out)]) == 0
    monkeypatch.setattr("spmd_lm.planning.search.search", lambda *_: pytest.fail("searched"))
    best = out.read_text()
    for arguments, message in (
        ([*line, str(other)], "is there, and not from an earlier --out. Remove it"),
        ([*line, str(run)], "is CONFIG too"),
        (["plan", str(out), *line[2:], str(out)], "is CONFIG too"),
        ([*line, str(tmp_path / "x"), "--json", str(tmp_path / "x")], "is --json too"),
        (["plan", str(run), "--topology", "h100:1x2", "--json", str(run)], "--json " + str(run) + ": is CONFIG too"),
    ):
        capsys.readouterr()
        assert main(arguments) == 2
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1
    assert run.read_text() == other.read_text() == CONFIG and out.read_text() == best
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "best.yaml", "other.yaml"}


def test_the_best_one_is_the_first_that_fits_compiled(found):
    """Whatever was predicted."""
    peaks = iter([1e12, 1e12, 1e9, 1e12, 1e9])

    def audit(*_):
        return {"ok": True, "collectives": [], "memory": {"peak": next(peaks)}, "exposed": None, "compile_seconds": 1.0}

    order = search_report.fastest_of_each(found, *MESH_AXES, "zero")
    best, compiled, notice = search_report.confirmed_best(found, 2, audit)
    assert best == order[2] and [each["fits"] for each in compiled] == [False, False, True, False, True] and not notice
    text = search_report.render(search_report.describe(found, best, compiled, notice))
    assert text.count("does NOT fit") == 3 and text.count(": fits, peak") == 2


def test_without_a_compiler_nothing_is_compiled(found, monkeypatch):
    monkeypatch.setattr("spmd_lm.analysis.topology.is_installed", lambda module: False)
    best, compiled, notice = search_report.confirmed_best(found, 1, lambda *_: pytest.fail("compiled"))
    assert best == found.fastest() and compiled == [] and "jax_plugins.xla_cuda13 is not installed" in notice
    assert notice in search_report.render(search_report.describe(found, best, compiled, notice))


REFUSAL = CompilerError("the compiler refuses this step: too large.", "too large", out_of_memory=True)
DEATH = "its compiler ended the process (killed by SIGSEGV)"


@pytest.mark.parametrize(
    ("audit", "reason"),
    [
        pytest.param(functools.partial(fail, REFUSAL), "too large", marks=pytest.mark.slow),
        (read_nowhere, DEATH),
    ],
    ids=["refused", "died"],
)
def test_a_refused_compile_loses_nothing_of_the_search(tmp_path, capsys, monkeypatch, audit, reason):
    monkeypatch.setattr(api, "_audit", audit)
    (tmp_path / "run.yaml").write_text(CONFIG)
    line = ["plan", str(tmp_path / "run.yaml"), "--search", "--topology", "h100:1x8", "--top", "2"]
    assert main([*line, "--json", str(tmp_path / "found.json")]) == 0
    told, result = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert (
        told.count("REFUSED by the compiler") == search_report.MOST_COMPILED
        and f"predicted): {reason}" in told
        and "best " in told
    )
    assert [each["refused"] for each in result["compiled"]] == [reason] * search_report.MOST_COMPILED
    assert "none of these 8 fits" in told
    assert all(each["compiled_peak"] is None and each["memory"] > 0 for each in result["compiled"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top", "1"], "--top is of a search. Add --search"),
        (["--topology", "abacus:8"], "'abacus' is not known"),
        (["--topology", "h100:4x2", "parallel.model=8"], "parallel.model=8 spans 4 hosts"),
        (["--topology", "2*v5e:2x2"], "parallel.replica=1 is not a multiple of the 2 slices"),
        (["--topology", "h100:1x8", "--devices", "8"], "Leave out --devices"),
        (["--topology", "h100:1x8", "--topology", "h100:1x4"], "a plan is for one --topology"),
        (["--search"], "--search needs hardware to search on"),
        (["--search", "--topology", "abacus:8"], "'abacus' is not known"),
        (
            ["--search", "--topology", "h100:1x8", "--out", "/nowhere/x.yaml"],
            "--out /nowhere/x.yaml: cannot",
        ),
        (["--search", "--topology", "h100:1x8", "--top", "-1"], "expected a whole number"),
        (["--search", "--topology", "h100:1x8", "--devices", "8"], "Leave out --devices"),
    ],
)
def test_bad_input_is_refused(tmp_path, capsys, arguments, message):
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert main(["plan", str(tmp_path / "run.yaml"), *arguments]) == 2
    assert message in capsys.readouterr().err
