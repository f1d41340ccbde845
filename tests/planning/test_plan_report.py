import dataclasses
import json
import math

import jax
import pytest
from jax.sharding import AbstractMesh

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.cost_model import flops
from spmd_lm.planning.plan_report import describe, render, summary
from spmd_lm.resolve import abstract_plan
from spmd_lm.runtime.formatting import format_bytes
from tests.helpers import FLOAT32, make_config, program, run_of, shard_bytes
from tests.parameter_count import parameters_by_formula

RUNS = [
    ("data8", 2, "unrolled"),
    ("data4-model2",),
    ("model8", 1, "unrolled", "full"),
    ("data8-zero3",),
    ("replica2-data2-model2-sequence-zero3", 2),
]


@pytest.mark.parametrize("run", RUNS, ids=[run[0] for run in RUNS])
def test_every_parameter_is_described_as_it_is_placed(run, x64):
    p = program(run_of(*run))
    params = p.init().params
    described = {each["name"]: each for each in describe(p.config, p.plan)["parameters"]}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert described.keys() == {".".join(key.key for key in path) for path, _ in leaves}
    for path, leaf in leaves:
        one = described[".".join(key.key for key in path)]
        assert tuple(one["shape"]) == leaf.shape
        assert one["bytes_per_device"] == leaf.addressable_shards[0].data.nbytes
        parts = [getattr(p.config.parallel, axis) for on in one["spec"] for axis in on]
        assert leaf.size == math.prod(parts) * leaf.addressable_shards[0].data.size
    assert sum(one["bytes_per_device"] for one in described.values()) == shard_bytes(params)


def test_figures_of_a_small_run():
    config = make_config(parallel={"data": 2, "replica": 2, "model": 2, "microbatches": 2}, precision=FLOAT32)
    d = describe(config)
    assert d == json.loads(json.dumps(d))
    assert (d["mesh"], d["devices"], d["platform"]) == ({"pipe": 1, "replica": 2, "data": 2, "model": 2}, 8, "cpu")
    assert d["vocab"] == {"model": 61, "padded": 62}
    assert d["batch"] == {
        "sequences": 16,
        "microbatches": 2,
        "sequences_per_device_and_microbatch": 2,
        "tokens": 256,
        "steps": 10,
    }
    assert d["parameter_count"] == parameters_by_formula(config)
    assert d["model_flops_per_step"] == flops.train_step(config, abstract_plan(config, 8, "cpu", "cpu"))
    assert d["attention"]["kernel"] == "xla"


MIXTRAL = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336, "vocab": 32000}
MIXTRAL |= {"context": 4096, "norm_type": "rms", "positions": "rotary", "activation": "swiglu", "use_bias": False}
MIXTRAL |= {"tie_embeddings": False, "dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.parametrize(
    ("capacity", "expert", "said"),
    [
        (
            1.25,
            8,
            "capacity 1.25: 1280 slots for 4096 tokens, 1.25 for each choice, in buffers of 80.0 MiB a layer (a ",
        ),
        (
            "none",
            8,
            "no capacity: 4096 slots for 4096 tokens, 4 for each choice, in buffers of 256.0 MiB a layer (what ",
        ),
        ("none", 1, "no capacity: megablox's products of sorted tokens, 64.0 MiB a layer (grouped product for tpu)"),
    ],
)
def test_experts_are_told_with_their_active_parameters_and_their_buffers(capacity, expert, said):
    """Mixtral 8x7B's 46.7 and 12.9 billion parameters (arXiv:2401.04088)."""
    config = make_config(
        model=MIXTRAL | {"mlp": {"kind": "moe", "experts": 8, "capacity": capacity}},
        precision=FLOAT32 | {"compute": "bfloat16"},
        parallel={"data": 64 // expert, "expert": expert, "zero": 3, "partitioner": "auto"},
        train={"batch": 64},
    )
    d = describe(config, topology=parse_topology("v5p:4x4x4"))
    assert d["parameter_count"] == pytest.approx(46.7e9, rel=1e-3)
    assert d["active_count"] == pytest.approx(12.88e9, rel=1e-3)
    assert d["mesh"].get("expert", 1) == expert
    text = summary(d)
    assert f"46,702,792,704 parameters, {d['active_count']:,} of them active per token" in text
    assert f"experts 8, 2 of each token; {said}" in text


def test_periods_of_layers_are_told_with_their_kernels():
    window = {"kind": "window", "span": 4}
    model = {"layers": 8, "kind": "bert", "attention_dropout": 0.0, "width": 64, "period": [window] * 5 + ["block"]}
    config = make_config(
        model=model, objective={"kind": "masked_lm"}, precision=FLOAT32 | {"compute": "bfloat16"}, parallel={"data": -1}
    )
    text = render(describe(config, topology=parse_topology("h100:1x8")))
    assert "layers  8 in periods of 5 window and 1 block, the last one of 2 layers, unrolled" in text
    assert "attention chunked, cudnn (span=4 of model.period: cuDNN's windows are causal; fused kernel for gpu)" in text


def test_a_simulated_run_is_planned_for_its_simulated_devices():
    config = make_config(run={"simulate_devices": 4}, parallel={"data": -1}, precision=FLOAT32)
    assert describe(config)["devices"] == 4


@pytest.mark.parametrize(
    ("topology", "zero", "scan"), [("h200:1x2", 1, False), ("h200:1x2", 3, True), ("v4:2x2x1", 1, True)]
)
def test_it_is_said_whether_layers_run_in_a_loop(topology, zero, scan):
    config = make_config(model={"layers": 3}, parallel={"data": -1, "zero": zero}, remat={"policy": "none"})
    d = describe(config, topology=parse_topology(topology))
    (line,) = [line for line in summary(d).splitlines() if line.startswith("layers ")]
    assert line.startswith(f"layers  3 {'in a loop' if scan else 'unrolled'} ({d['layers']['why']})")
    copies = d["layers"]["loop_copies"]
    assert line.endswith(f"; a loop copies at least {copies / 1e9:,.3g} GB a step" if copies else ")")
    assert bool(copies) == topology.startswith("h200")


def test_the_text_has_a_line_for_every_parameter():
    d = describe(make_config(parallel={"data": 4, "model": 2}, precision=FLOAT32))
    lines = render(d).splitlines()
    for one in d["parameters"]:
        (line,) = [line for line in lines if line.startswith(one["name"] + " ")]
        assert ("model" in line) == (["model"] in one["spec"])
        assert format_bytes(one["bytes_per_device"]) in line
    assert render(d).startswith(summary(d))
    assert "vocabulary 61 padded to 62" in summary(d) and "data 4 x model 2 = 8 devices (cpu)" in summary(d)
    for row, size in d["memory"].items():
        assert any(line.startswith(row) and line.endswith(format_bytes(size)) for line in lines)


@pytest.mark.parametrize(
    ("schedule", "chunks", "policy", "topology"),
    [("1f1b", 1, "block", None), ("breadth_first", 2, "full", None), ("1f1b", 1, "full", parse_topology("v4:2x2x2"))],
    ids=str,
)
def test_a_pipeline_is_drawn_and_ways_to_gather_are_compared(schedule, chunks, policy, topology):
    parallel = {"pipe": 2, "data": 4, "zero": 3, "microbatches": 4, "schedule": schedule, "chunks": chunks}
    config = make_config(model={"layers": 4}, parallel=parallel, remat={"policy": policy}, precision=FLOAT32)
    d = describe(config, topology=topology)
    lines, options = render(d).splitlines(), d["pipeline"]["choices"]
    assert [line for line in lines if line.startswith("stage 0 ")] and d["pipeline"]["drawing"] in render(d)
    assert [option["gathers"] for option in options] == [
        "for each microbatch",
        "once a step",
        "for each layer and direction",
    ]
    best = min(options, key=lambda option: option["memory"] * option["wire"])
    assert [option["recommended"] for option in options] == [option is best for option in options]
    here = next(option for option in options if (option["schedule"], option["reduce_once"]) == (schedule, False))
    assert here["memory"] == sum(d["memory"].values()) and here["bubble"] == d["pipeline"]["bubble"]


def test_ways_to_gather_that_would_be_refused_are_left_out():
    parallel = {"pipe": 2, "data": 4, "zero": 3, "microbatches": 4, "schedule": "breadth_first", "chunks": 2}
    config = make_config(model={"layers": 4}, parallel=parallel | {"prefetch": "on"}, precision=FLOAT32)
    options = describe(config)["pipeline"]["choices"]
    assert [option["gathers"] for option in options] == ["for each microbatch", "for each layer and direction"]
    assert sum(option["recommended"] for option in options) == 1


def test_singular_and_plural():
    one = summary(describe(make_config(run={"simulate_devices": 1}, precision=FLOAT32)))
    assert "= 1 device (cpu)" in one and "= 1 microbatch x 1 shard x 16" in one
    more = {"data": 2, "microbatches": 2}
    several = summary(describe(make_config(run={"simulate_devices": 2}, parallel=more, precision=FLOAT32)))
    assert "= 2 devices (cpu)" in several and "= 2 microbatches x 2 shards x 4" in several


def test_what_runs_beside_the_computation_is_in_the_summary():
    ahead = {"data": 4, "model": 2, "sequence": True, "zero": 3, "prefetch": "on", "collective_matmul": "on"}
    d = describe(make_config(model={"layers": 4}, parallel=ahead, precision=FLOAT32))
    assert d["prefetch"] == ["attention"] and d["collective_matmul"] == ["attention", "mlp"]
    plain = summary(describe(make_config(parallel={"data": 4, "model": 2}, precision=FLOAT32)))
    for said in (", attention gathered a layer ahead", ", products of attention and mlp in parts"):
        assert said in summary(d) and said not in plain
    by_chunk = {"pipe": 2, "data": 4, "zero": 3, "schedule": "breadth_first", "chunks": 2, "microbatches": 2}
    d = describe(make_config(model={"layers": 4}, parallel=by_chunk | {"prefetch": "on"}, precision=FLOAT32))
    assert d["prefetch"] == [] and d["prefetch_chunks"] and ", chunks gathered ahead" in summary(d)


def test_how_attention_reaches_over_context_is_in_the_summary():
    assert "\ncontext " not in summary(describe(make_config(parallel={"data": 8}, precision=FLOAT32)))
    config = make_config(parallel={"context": 8, "context_attention": "ring"}, precision=FLOAT32)
    (line,) = [line for line in summary(describe(config)).splitlines() if line.startswith("context ")]
    assert line == "context attention by ring (as configured)"
    plan = abstract_plan(config, 8, "cpu", "cpu")
    sizes = {axis: size for axis, size in plan.mesh.shape.items() if axis != "context"} | {"context0": 4, "context1": 2}
    on_torus = dataclasses.replace(plan, mesh=AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    assert f"{line}; context0 4 x context1 2 on the torus, no single ring: every hop" in summary(
        describe(config, on_torus)
    )


def test_a_deterministic_run_says_so_and_which_attention_it_takes():
    def kernel_line(platform: str, **run: bool) -> str:
        model = {"width": 512, "heads": 8, "attention_dropout": 0.0}
        config = make_config(model=model, parallel={"data": 1}, precision={"compute": "bfloat16"}, run=run)
        lines = summary(describe(config, abstract_plan(config, 1, platform, ""))).splitlines()
        return next(line for line in lines if line.startswith("kernel "))

    assert kernel_line("gpu") == "kernel  attention cudnn (fused kernel for gpu), compute bfloat16"
    deterministic = kernel_line("gpu", deterministic=True)
    assert "attention chunked (run.deterministic=true: cuDNN's attention ends in its first step" in deterministic
    assert deterministic.endswith("compute bfloat16, deterministic")
    assert kernel_line("cpu", deterministic=True).endswith("compute bfloat16, deterministic")


def test_a_loss_scale_is_in_the_summary():
    float16 = {"compute": "float16", "loss_scale": "dynamic"}
    text = summary(describe(make_config(run={"simulate_devices": 1}, precision=FLOAT32 | float16)))
    assert "compute float16, initial loss scale 2^16" in text
    assert "loss scale" not in summary(describe(make_config(run={"simulate_devices": 1}, precision=FLOAT32)))


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20 * 1.5, "1.5 MiB"), (2**50, "1024.0 TiB")]
)
def test_bytes_as_text(size, text):
    assert format_bytes(size) == text
