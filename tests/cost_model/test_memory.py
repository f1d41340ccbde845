import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding

from spmd_lm.axes import is_dim_names
from spmd_lm.cost_model import memory
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.parallel import groups
from spmd_lm.parallel.groups import offloaded_parameters
from spmd_lm.planning import plan_report
from spmd_lm.planning.audit import audit_step
from spmd_lm.resolve import abstract_plan
from tests.helpers import FLOAT32, device_batch, make_config, program, run_of, shard_bytes
from tests.planning.test_audit import compilable

ROOT = Path(__file__).parents[2]


def table(config, platform="cpu"):
    return memory.table(config, abstract_plan(config, 8, platform, ""))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(("data8", 2, "unrolled"), marks=pytest.mark.slow),
        ("data4-model2",),
        pytest.param(("model8", 1, "unrolled", "full"), marks=pytest.mark.slow),
    ],
    ids=["data8", "data4-model2", "model8"],
)
def test_state_is_what_the_compiled_step_takes_as_arguments(run, x64):
    """Apart from the batch, and 4 bytes each of the step number and of Adam's count."""
    p = program(run_of(*run))
    taken = p.compiled.memory_analysis().argument_size_in_bytes - shard_bytes(device_batch(p, 0))
    assert sum(memory.state(p.config, p.plan).values()) == taken - 8
    assert table(p.config)["parameters"] == shard_bytes(p.init().params)


@pytest.mark.slow
def test_experts_are_held_by_their_devices_alone(x64):
    """And over `data` by ZeRO; the rest over both."""
    moe = {"mlp": {"kind": "moe", "experts": 4}}
    config = make_config(model=moe, parallel={"data": 2, "expert": 2, "zero": 3})
    p = program(config)
    taken = p.compiled.memory_analysis().argument_size_in_bytes - shard_bytes(device_batch(p, 0))
    assert sum(memory.state(config, p.plan).values()) == taken - 8


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_the_step_takes_no_masters_or_moments_of_what_is_offloaded(zero):
    """Only weights in the compute dtype, and the state of vectors; the host has the rest."""
    sections = {"parallel": {"data": 8, "zero": zero}, "precision": LOW}
    p, whole = (program(make_config(optim={"offload": offload}, **sections)) for offload in ("host", "none"))
    taken = p.compiled.memory_analysis().argument_size_in_bytes - shard_bytes(device_batch(p, 0))
    assert sum(memory.state(p.config, p.plan).values()) == taken - 8
    state, on_host = p.init(), memory.state_on_host(p.config, p.plan)
    assert on_host == shard_bytes(state.group_states) == memory.copied_by_updates(p.config, p.plan)[TO_DEVICES]
    assert p.copied_by_updates() == memory.copied_by_updates(p.config, p.plan)
    weights = on_host // 6  # two bytes of twelve
    assert taken - 8 + on_host - weights == sum(memory.state(whole.config, whole.plan).values())


TO_DEVICES = "masters and moments to devices"
LOW, FULL = FLOAT32 | {"compute": "bfloat16"}, {"policy": "full"}


def test_dtypes_and_accumulation_set_the_rest():
    low = LOW | {"reduce": "bfloat16"}
    narrow, wide, several = (
        table(run_of("data4-model2", n, precision=dtypes, remat="full"), "tpu")
        for n, dtypes in ((1, low), (1, FLOAT32), (2, low))
    )
    assert several["weights"] == several["parameters"] / 2 and not wide["weights"]  # where nothing is converted
    assert narrow["weights"] < several["weights"]  # no other microbatch reads those of embedding and head again
    assert narrow["gradients"] == narrow["parameters"] / 2  # in the dtype they are computed and reduced in
    assert several["gradients"] == several["parameters"] * 1.5  # and added up in the parameters' own
    assert several["activations"] == narrow["activations"] / 2 == wide["activations"] / 4


def test_each_stage_of_zero_holds_less():
    tables = [table(make_config(parallel={"data": 8, "zero": zero}, precision=FLOAT32)) for zero in range(4)]
    state = [t["parameters"] + t["adam moments"] for t in tables]
    assert state[0] > 6 * state[1] and state[1] == state[2] == state[3]  # vectors stay whole
    assert tables[1]["gradients"] > tables[2]["gradients"] == tables[3]["gradients"]
    assert tables[2]["weights"] > tables[3]["weights"] > 0
    totals = [sum(t.values()) for t in tables]
    assert totals[0] > totals[2] > totals[3]


def saved(config, platform="cpu"):
    return memory.saved_activations(config, abstract_plan(config, 8, platform, ""))


def test_remat_saves_less(x64):
    runs = {policy: run_of("data4-model2", remat=policy) for policy in ("none", "selective", "full")}
    assert saved(runs["none"]) > saved(runs["selective"]) > saved(runs["full"])
    c = make_config()
    assert saved(runs["full"]) == c.train.batch // 4 * c.model.context * c.model.layers * c.model.width * 8  # inputs


def test_offloaded_inputs_are_the_hosts_but_for_two():
    """Of a TPU; a CPU's compiler does not tell its host's memory from a device's."""
    sections = {"parallel": {"data": 8}, "precision": LOW}
    full, offload = (make_config(model={"layers": 8}, remat={"policy": p}, **sections) for p in ("full", "offload"))
    on_tpu, on_cpu = (abstract_plan(offload, 8, platform, "") for platform in ("tpu", "cpu"))
    inputs = saved(full, "tpu")
    assert memory.activations_on_host(full, on_tpu) == memory.activations_on_host(offload, on_cpu) == 0
    assert memory.activations_on_host(offload, on_tpu) == inputs and saved(offload, "cpu") == saved(full, "cpu")
    held = memory.table(full, on_tpu)["activations"] - memory.table(offload, on_tpu)["activations"]
    assert held == inputs * 6 / 8
    assert memory.saved_activations(offload, on_tpu) == 0
    untied, optim = {"layers": 8, "tie_embeddings": False}, {"freeze": "blocks.* embedding.*"}
    frozen = make_config(model=untied, remat={"policy": "offload"}, optim=optim)
    assert memory.activations_on_host(frozen, abstract_plan(frozen, 1, "tpu", "")) == 0


def test_a_remat_block_saves_its_input_and_what_is_inside_one_of_them():
    def of_blocks(**remat):
        return saved(make_config(model={"layers": 8}, parallel={"data": 8}, precision=LOW, remat=remat), "tpu")

    everything, inputs = of_blocks(policy="none"), of_blocks(policy="full")
    assert of_blocks(policy="block", block_size=2) == inputs / 2 + everything / 4


def test_a_sharded_sequence_divides_what_is_saved():
    whole, shards = (
        saved(make_config(parallel={"data": 1, "model": 8, "sequence": s}, precision=LOW, remat=FULL), "tpu")
        for s in (False, True)
    )
    assert whole == 8 * shards


def test_heads_are_padded_to_lanes_on_a_tpu():
    def of_heads(platform, heads):
        model = {"width": 512, "heads": heads, "context": 512, "dropout": 0.0, "attention_dropout": 0.0}
        return saved(make_config(model=model, parallel={"data": 8}, precision=LOW), platform)

    assert of_heads("tpu", 8) > of_heads("tpu", 4) and of_heads("gpu", 8) == pytest.approx(of_heads("gpu", 4), rel=0.01)


def test_logits_are_held_a_chunk_at_a_time(x64):
    sizes = {"vocab": 2**16, "context": 128, "layers": 2, "attention_dropout": 0.0}
    big = run_of("data4-model2", model=sizes, remat="full", train={"batch": 64})
    for platform, arrays in (("tpu", 1), ("gpu", 1.5)):
        point = memory.fullest_point(big, abstract_plan(big, 8, platform, ""))
        assert (point.name, point.workspace) == (memory.HEAD, arrays * 2**27)
    small = run_of("data4-model2")
    assert memory.fullest_point(small, abstract_plan(small, 8, "cpu", "")).name == memory.BLOCKS


def test_a_head_alone_saves_nothing():
    """And holds what forward does."""
    freeze = {"freeze": "embedding.* blocks.*"}
    config = make_config(
        model={"tie_embeddings": False, "layers": 64}, parallel={"data": 8}, precision=LOW, optim=freeze
    )
    point = memory.fullest_point(config, abstract_plan(config, 8, "tpu", ""))
    assert point.activations == 0 and point.name in (memory.FORWARD, memory.HEAD)


def test_a_tpu_casts_all_shards_and_others_layer_by_layer():
    config = make_config(model={"layers": 64}, parallel={"data": 8, "zero": 3}, precision=LOW)
    plans = [abstract_plan(config, 8, platform, "") for platform in ("tpu", "gpu")]
    weights = [memory.fullest_point(config, plan).weights for plan in plans]
    assert weights[0] - weights[1] == pytest.approx(plans[0].bytes_per_device("bfloat16", "blocks"), rel=0.05)


def test_unrolled_layers_on_a_gpu_end_with_all_gradients_beside_all_weights():
    """Weights were gathered as stacks, which live until the first layer's backward."""
    model = {"layers": 32, "width": 256, "context": 16, "dropout": 0.0, "attention_dropout": 0.0, "scan": False}
    config = make_config(model=model, parallel={"data": 8, "zero": 1}, precision=LOW, remat=FULL)
    plan = abstract_plan(config, 8, "gpu", "")
    point, all_of_it = memory.fullest_point(config, plan), plan.bytes_per_device("bfloat16", "blocks", gathered=True)
    assert not plan.scan and point.name == memory.BLOCKS
    assert point.weights == all_of_it and point.gradients == plan.bytes_per_device("bfloat16", gathered=True)


def test_a_breadth_first_pipeline_holds_a_chunk_in_two_layouts():
    """ZeRO-3 gathers it for all microbatches."""

    def weights(zero):
        schedule = {"schedule": "breadth_first", "microbatches": 4, "zero": zero, "prefetch": "off"}
        config = make_config(
            model={"layers": 64, "use_bias": False}, parallel={"pipe": 2, "data": 2} | schedule, precision=LOW
        )
        plan = abstract_plan(config, 4, "tpu", "")
        return memory.fullest_point(config, plan).weights, plan.bytes_per_device("bfloat16", "blocks", gathered=True)

    (three, chunk), (two, _) = weights(3), weights(2)
    assert two == pytest.approx(2 * chunk, rel=0.01) and three == pytest.approx(2.5 * chunk, rel=0.01)


def test_bytes_of_every_leaf_add_up(x64):
    plan = abstract_plan(make_config(parallel={"data": 4, "model": 2}), 8, "cpu", "")
    gathered_specs = jax.tree.map(plan.param_rules.spec, plan.names, is_leaf=is_dim_names)
    for gathered, specs in ((False, plan.param_specs), (True, gathered_specs)):
        leaves = zip(jax.tree.leaves(plan.padded_shapes), jax.tree.leaves(specs), strict=True)
        sizes = [math.prod(NamedSharding(plan.mesh, spec).shard_shape(leaf.shape)) for leaf, spec in leaves]
        assert sizes == [each.gathered_elements if gathered else each.elements for each in plan.parameters]
        assert plan.elements_per_device(gathered=gathered) == sum(sizes)
    parts = {part: plan.elements_per_device(part) for part in plan.shapes}
    assert sum(parts.values()) == plan.elements_per_device()
    assert 0 < plan.elements_per_device("blocks", "attention") < parts["blocks"]


@pytest.mark.slow
def test_remat_saves_what_was_published():
    """arXiv:2205.05198, figure 7, of GPT-3's proportions, as parts of what no remat keeps without sequence parallelism:
    19% selective with it; 9% full, whose inputs the paper leaves whole.  A layer's trace saves what a step's loop
    hands on."""
    line = [sys.executable, ROOT / "benchmarks/remat.py", "--topology", "cpu:8"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in row.strip("| ").split("|")] for row in done.stdout.splitlines() if "%" in row]
    found = {(policy, sequence): list(map(float, figures[:2])) for policy, sequence, *figures in rows}
    assert len(found) == 8
    for layer, step in found.values():
        assert layer == pytest.approx(step, abs=0.02), done.stdout
    _, none = found["none", "whole"]
    assert found["selective", "split"][1] <= 0.20 * none and found["full", "split"][1] <= 0.12 * none, done.stdout


@pytest.mark.slow
def test_a_gpu_s_unrolled_layers_hold_what_their_backward_gathers():
    """Without it, 12% of the peak would be missing."""
    model = {"layers": 12, "width": 2048, "heads": 16, "context": 1024, "vocab": 32_000}
    certain = {"dropout": 0.0, "attention_dropout": 0.0}
    parallel = {"data": 1, "model": 8, "sequence": True, "microbatches": 2}
    config = make_config(
        model=model | certain, parallel=parallel, precision=LOW, train={"batch": 16}, remat={"policy": "selective"}
    )
    program, _, _, report = audit_step(config, compilable("h100:1x8"))
    found = report["memory"]
    assert not program.plan.scan and sum(found["planned"].values()) == pytest.approx(found["peak"], rel=0.05)


def test_zero_offload_s_split():
    """ZeRO-Offload (arXiv:2101.06840), section 4: of 16 bytes of state per parameter 2 stay on the device, beside the
    gradients, and 4 cross to the host and back in a step."""
    precision = LOW | {"reduce": "bfloat16"}
    optim = {"offload": "host", "offload_update": "host"}
    config = make_config(model={"width": 512}, precision=precision, optim=optim, parallel={"data": 8, "zero": 2})
    plan = abstract_plan(config, 8, "gpu", "")
    matrices = sum(each.elements for each in offloaded_parameters(plan))
    vectors = plan.elements_per_device() - matrices
    assert vectors < 0.05 * matrices
    assert sum(memory.state(config, plan).values()) == 2 * matrices + 12 * vectors
    assert memory.state_on_host(config, plan) == 12 * matrices
    assert memory.copied_by_updates(config, plan) == {
        "gradients to hosts": 2 * matrices,
        "weights to devices": 2 * matrices,
    }


@pytest.mark.parametrize(("place", "on_host"), [("device", 3 * 12 * 2**16), ("host", 3 * 12 * 2**18)])
def test_a_host_whose_disk_holds_the_state_holds_three_groups(place, on_host, monkeypatch):
    """Of layers of stacks, or of whole matrices; and the disk what the host held."""
    monkeypatch.setattr(groups, "GROUP_ELEMENTS", 2**16)
    model = {"width": 64, "heads": 8, "layers": 16, "vocab": 256}
    on_disk, in_memory = (
        make_config(model=model, precision=LOW, optim={"offload": offload, "offload_update": place})
        for offload in ("disk", "host")
    )
    plan = abstract_plan(on_disk, 1, "cpu", "")
    size = memory.state_on_host(in_memory, plan)
    assert (memory.state_on_disk(on_disk, plan), memory.state_on_disk(in_memory, plan)) == (size, 0)
    assert memory.state_on_host(on_disk, plan) == on_host < size
    assert memory.table(on_disk, plan) == memory.table(in_memory, plan)
    copies = {"masters and moments from disk": size, "masters and moments to disk": size}
    assert memory.copied_by_updates(on_disk, plan) == memory.copied_by_updates(in_memory, plan) | copies
    described = plan_report.describe(on_disk, plan)
    assert described["disk"] == size and "masters and moments on disk" in plan_report.render(described)


@pytest.mark.parametrize(("layers", "width", "terabytes"), [(80, 10240, 0.05), (100, 20480, 0.12), (128, 25600, 0.20)])
def test_zero_infinity_s_activation_checkpoints(layers, width, terabytes):
    """ZeRO-Infinity (arXiv:2104.07857), table 2: 2 x batch x row x width x layers bytes; 32 rows of 1024 a node."""
    model = {"layers": layers, "width": width, "heads": width // 128, "context": 1024, "vocab": 50304}
    sections = {"train": {"batch": 32}, "precision": LOW, "remat": {"policy": "offload"}}
    config = make_config(model=model, parallel={"data": 16, "zero": 3}, **sections)
    per_node = 16 * memory.activations_on_host(config, abstract_plan(config, 16, "gpu", ""))
    assert per_node == 2 * 32 * 1024 * width * layers
    assert round(per_node / 2**40, 2) == terabytes


STATES = [(80, 10240, 1.83), (100, 20480, 9.16), (128, 25600, 18.31), (195, 65536, 182.81), (315, 163840, 1845.70)]


@pytest.mark.parametrize(("layers", "width", "tebibytes"), STATES)
def test_zero_infinity_s_model_states(layers, width, tebibytes):
    """ZeRO-Infinity, table 2: 20 bytes for each of 12 x width^2 parameters a layer.  Of these 16 are ours, 12 on disk
    and 2 of weights and 2 of gradients on devices; the others are gradients in float32.  The paper's 10T parameters on
    one DGX-2 have their weights on disk too; ours stay on devices, where 0.5T do not fit."""
    model = {"layers": layers, "width": width, "heads": width // 128, "context": 1024, "vocab": 512}
    sections = {"train": {"batch": 32}, "precision": LOW | {"reduce": "bfloat16"}, "optim": {"offload": "disk"}}
    config = make_config(model=model, parallel={"data": 16, "zero": 3}, **sections)
    plan = abstract_plan(config, 16, "gpu", "")
    on_device, on_disk = sum(memory.state(config, plan).values()), memory.state_on_disk(config, plan)
    elements = 12 * layers * width**2 / 16
    assert on_device / elements == pytest.approx(2, rel=0.02) and on_disk / elements == pytest.approx(12, rel=0.01)
    gradients = on_disk / 12 * memory.dtype_bytes(config.precision.reduce)
    assert 16 * (on_device + gradients + on_disk) * 20 / 16 == pytest.approx(tebibytes * 2**40, rel=0.01)
    assert (on_device > find_hardware("Tesla V100").memory.size) == (width > 10240)


def test_updates_hold_gradients_and_two_groups(monkeypatch):
    """Where nothing of forward and backward is more: the optimizer's memory no longer grows with the model's."""
    monkeypatch.setattr(groups, "GROUP_ELEMENTS", 2**16)
    sections = {"model": {"layers": 16, "width": 256}, "precision": LOW, "train": {"batch": 1}, "remat": FULL}
    config = make_config(optim={"offload": "host"}, **sections)
    point = memory.fullest_point(config, plan := abstract_plan(config, 1, "tpu", ""))
    matrices = sum(each.elements for each in offloaded_parameters(plan))
    largest = max(each.elements // 16 for each in offloaded_parameters(plan) if each.names[0] == "layers")
    assert (point.name, point.gradients) == (memory.UPDATE, 4 * matrices)
    assert point.workspace == 2 * 12 * largest
