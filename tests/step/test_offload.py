"""A step whose optimizer state is on the host gives the result of one whose state is on the devices.

Bit for bit in float32 and less with jax before 0.12, which compiles both to the same arithmetic.  Later versions fuse
differently: there the runs are in float64, and equal to its rounding."""

import jax
import numpy as np
import pytest
from orbax.checkpoint._src.serialization import replica_slices

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.checkpoints.storage import OrbaxStorage, ShardStorage
from spmd_lm.cost_model import memory
from spmd_lm.errors import ConfigError, ReplicaError
from spmd_lm.parallel import groups
from spmd_lm.parallel.host_memory import PINNED, moved
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.resolve import abstract_plan
from spmd_lm.step import offload as offload_module
from spmd_lm.step import program as program_module
from spmd_lm.step.offload import HostUpdate
from spmd_lm.step.program import Program
from spmd_lm.training.replicas import ReplicaCheck
from tests.helpers import FLOAT32, assert_close, assert_equal, degrees, device_batch, make_config
from tests.own import write_module
from tests.reliability.test_replicas import with_flip

SAME_BITS = jax.__version_info__ < (0, 12)
MIXED = {"params": "float32", "compute": "bfloat16", "reduce": "float32"}
SIXTEEN = {"params": "float32", "compute": "bfloat16", "reduce": "bfloat16"}
FLOAT16 = {"params": "float32", "compute": "float16", "reduce": "float32", "loss_scale": "dynamic"}
FLOAT16 |= {"initial_scale": 2.0**30, "hysteresis": 1}  # its first steps overflow, and are skipped
slow, watcher = pytest.mark.slow, pytest.mark.mutants


def case(name, *marks, precision=FLOAT32, optim=None, **sections):
    layers = {"layers": sections.pop("layers", 4)}
    sections = {"model": layers, "precision": precision, "optim": optim or {}, **sections}
    return pytest.param(sections, marks=marks, id=name)


def parallel(**keys):
    return {"data": 1} | keys


CASES = [
    case(
        "zero3",
        slow,
        watcher,
        parallel=parallel(data=4, model=2, sequence=True, zero=3),
        precision=MIXED,
        optim={"clip": 0.1, "freeze": "blocks.[0-1].mlp.*"},
    ),
    case(
        "1f1b, layers frozen",
        slow,
        parallel=parallel(pipe=2, data=2, zero=2, microbatches=4),
        optim={"kind": "lion", "freeze": "blocks.[0-1].mlp.* blocks.2.attention.query embedding.tokens"},
    ),
    case("one", slow, precision=MIXED),
    case("zero0", slow, parallel=parallel(data=8), precision=MIXED),
    case("zero1", slow, parallel=parallel(data=8, zero=1)),
    case("zero2", slow, parallel=parallel(data=4, model=2, zero=2, microbatches=4), precision=SIXTEEN),
    case("hybrid", slow, parallel=parallel(replica=2, data=2, model=2, zero=3, sequence=True), precision=MIXED),
    case(
        "breadth first",
        slow,
        layers=8,
        parallel=parallel(pipe=2, chunks=2, data=2, zero=3, microbatches=4, schedule="breadth_first"),
        precision=MIXED,
        optim={"freeze": "blocks.[0-2].* *_bias"},
    ),
    case("float16", slow, parallel=parallel(data=4, zero=1), precision=FLOAT16),
    case("adapters", slow, parallel=parallel(data=4, model=2, zero=3), precision=MIXED, adapter={"kind": "lora"}),
    case("types", slow, parallel=parallel(data=4, model=2, zero=2, partitioner="types")),
    case("lion", slow, parallel=parallel(data=2, zero=3), precision=MIXED, optim={"kind": "lion"}),
]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Groups of a layer of the largest matrices, so that stacks are split."""
    monkeypatch.setattr(groups, "GROUP_ELEMENTS", 1024)


@pytest.fixture
def float64_unless_bits_are_equal(request):
    if not SAME_BITS:
        request.getfixturevalue("x64")


def make_program(sections, **optim) -> Program:
    sections = sections | {"optim": sections.get("optim", {}) | optim}
    if not SAME_BITS and sections["precision"].get("loss_scale") is None:
        sections |= {"precision": dict.fromkeys(FLOAT32, "float64")}
    config = make_config(**sections)
    return Program(config, jax.devices()[: degrees(config).devices])


def run(p: Program, state, steps: range):
    """(state, losses and gradients' norms)."""
    metrics = []
    for step in steps:
        state, values = p.step(state, device_batch(p, step))
        metrics.append([float(values[name]) for name in ("loss", "grad_norm", "skip_reason")])
        metrics[-1].append(bool(values.get("skipped", False)))
    return state, np.array(metrics)


def on_host(p: Program, state):
    return jax.device_get(p.canonical(state))


def assert_same(got, want) -> None:
    (state, metrics), (other, others) = got, want
    if SAME_BITS:
        assert_equal(metrics, others)
        assert_equal(state, other)
    else:
        np.testing.assert_allclose(metrics, others, rtol=1e-12)
        assert_close(leaves_by_path(state), leaves_by_path(other), 1e-11)


@pytest.mark.parametrize("sections", CASES)
def test_offloaded_state_makes_the_same_run(sections, request, tmp_path, float64_unless_bits_are_equal):
    """On the devices, on the host, from the host's memory and from its disk; and switched on and off in the middle."""
    steps = 20 if "slow" in [mark.name for mark in request.node.iter_markers()] else 4
    plain = make_program(sections)
    begun, first = run(plain, plain.init(), range(steps // 2))
    middle = on_host(plain, begun)
    last, second = run(plain, begun, range(steps // 2, steps))
    whole = on_host(plain, last), np.concatenate([first, second])
    if sections["precision"].get("loss_scale"):
        assert 0 < whole[1][:, -1].sum() < steps  # some steps were skipped, and some were not
    else:
        assert not np.array_equal(whole[1][0], whole[1][-1])

    device, host = (make_program(sections, offload="host", offload_update=place) for place in ("device", "host"))
    disk = {"offload": "disk", "offload_dir": str(tmp_path)}
    on_disk = [make_program(sections, offload_update=place, **disk) for place in ("device", "host")]
    vars(host)["compiled"] = device.compiled  # the same program: only the updates differ
    for p, like in zip(on_disk, (device, host), strict=True):  # and here the updates are the same, too
        vars(p)["compiled"] = device.compiled
        vars(p.offload.place).update(vars(like.offload.place))
    start = on_host(plain, plain.init())
    for p in (device, host):
        state = p.init()
        assert_equal(on_host(p, state), start)
        memories = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.group_states)}
        assert memories == ({PINNED} if p is device else {jax.devices()[0].default_memory().kind})
        state, first = run(p, state, range(steps // 2))
        assert_same((on_host(p, state), first), (middle, whole[1][: steps // 2]))
        state, second = run(p, state, range(steps // 2, steps))
        assert_same((on_host(p, state), second), (whole[0], whole[1][steps // 2 :]))

        state, second = run(p, p.from_canonical(placed(p, middle)), range(steps // 2, steps))
        assert_same((on_host(p, state), second), (whole[0], whole[1][steps // 2 :]))

    for p in on_disk:
        state, first = run(p, p.from_canonical(placed(p, start)), range(steps // 2))
        assert_same((on_host(p, state), first), (middle, whole[1][: steps // 2]))
        state, second = run(p, state, range(steps // 2, steps))
        assert_same((on_host(p, state), second), (whole[0], whole[1][steps // 2 :]))
        p.close()
        assert not any(tmp_path.iterdir())


@slow
@pytest.mark.parametrize(
    "rule", ["optax.scale_by_sign()", "optax.trace(0.9)", "optax.scale_by_adam(mu_dtype='bfloat16')"]
)
def test_rules_of_one_s_own_are_offloaded(rule, tmp_path, float64_unless_bits_are_equal):
    """Without a state, with one of another dtype, and with a division by scalars, which may round otherwise."""
    module = write_module(tmp_path, "direction", f"import optax\n\ndef direction():\n    return {rule}\n")
    optim = {"kind": "custom", "module": module}
    sections = {"precision": MIXED, "parallel": parallel(data=4, zero=1), "optim": optim}
    plain = make_program(sections)
    want = run(plain, plain.init(), range(3))
    for place in ("device", "host"):
        p = make_program(sections, offload="host", offload_update=place)
        state, metrics = run(p, p.init(), range(3))
        np.testing.assert_allclose(metrics, want[1], rtol=1e-6)
        for path, leaf in leaves_by_path(on_host(p, state)).items():
            np.testing.assert_allclose(leaf, leaves_by_path(on_host(plain, want[0]))[path], rtol=1e-5, atol=1e-5)
        assert p.copied_by_updates() == memory.copied_by_updates(p.config, p.plan)


def placed(p: Program, state):
    """A canonical state, read into the program's memories, as a checkpoint is."""
    return jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, p.abstract_canonical())


@slow
@pytest.mark.parametrize("storage", [OrbaxStorage, ShardStorage])
def test_checkpoints_do_not_depend_on_offload(storage, tmp_path):
    """Saved while the run continues; restored under other layouts, offloaded or not."""
    sections = {"model": {"layers": 4}, "precision": MIXED, "parallel": parallel(data=4, model=2, zero=2)}
    others = [
        make_program(sections),
        make_program(sections | {"parallel": parallel(pipe=2, data=2, zero=1, microbatches=2)}, offload="host"),
        make_program(sections | {"parallel": parallel(data=8, zero=3)}, offload="host", offload_update="host"),
    ]
    for place in ("device", "host"):
        p = make_program(sections, offload="host", offload_update=place)
        state, _ = run(p, p.init(), range(2))
        saved = on_host(p, state)
        checkpoints = Checkpointer(tmp_path / place, storage=storage())
        checkpoints.save(2, p.canonical(state), make_meta({}, 0, ""))
        run(p, state, range(2, 4))
        checkpoints.close()
        for other in others:
            restored = Checkpointer(tmp_path / place, storage=storage()).restore(2, other.abstract_canonical())
            described = [(leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(other.abstract_canonical())]
            assert [(leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(restored)] == described
            assert_equal(jax.device_get(restored), saved)
            assert_equal(on_host(other, other.from_canonical(restored)), saved)


def test_devices_hold_weights_in_the_compute_dtype_and_state_of_vectors_alone():
    p = make_program({"precision": MIXED, "parallel": parallel(data=4, zero=1)}, offload="host")
    state = p.init()
    described = jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype), x.sharding), (state.on_device, p.abstract_state()))
    assert described[0] == described[1]
    expected = np.float64 if not SAME_BITS else "bfloat16"
    for path, leaf in leaves_by_path(state.params).items():
        is_matrix = leaf.ndim > 1 + path.startswith("blocks.")
        assert leaf.dtype == (expected if is_matrix else leaf.dtype)
        assert (path in leaves_by_path(state.opt_state.mu)) == (not is_matrix)
    a_group = state.group_states[0][0]
    assert len(a_group) == 3 and all(leaf.dtype != "bfloat16" for leaf in jax.tree.leaves(a_group))


@slow
def test_a_save_holds_masters_or_moments_of_one_stack_at_a_time(monkeypatch):
    """Beside parts of it, and the groups that are fetched; and it compiles nothing the second time."""
    wide = {"model": {"layers": 8, "width": 64, "heads": 4, "dropout": 0.0}, "train": {"batch": 1}}
    p = make_program({"precision": MIXED, "parallel": parallel()} | wide, offload="host")
    state, held = p.init(), []

    def on_devices() -> int:
        arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind != PINNED]
        return sum(x.nbytes for x in arrays)

    def watched(tree, memory):
        result = moved(tree, memory)
        held.append(on_devices())
        return result

    for module in (program_module, offload_module):
        monkeypatch.setattr(module, "moved", watched)
    before = on_devices()
    p.canonical(state)
    largest = max(each.elements for each in groups.offloaded_parameters(p.plan))
    a_group = max(group.elements for made in p.offload.groups for group in made)
    masters = 4 if SAME_BITS else 8  # bytes
    assert max(held) - before <= masters * (2 * largest + 3 * a_group)
    compiled = p.offload._take_layers.cache_info(), p.offload._concatenate.cache_info()
    p.canonical(state)
    again = p.offload._take_layers.cache_info(), p.offload._concatenate.cache_info()
    assert [each.misses for each in again] == [each.misses for each in compiled]


@slow
def test_a_host_keeps_one_copy_of_what_its_devices_share():
    p = make_program({"precision": MIXED, "parallel": parallel(data=8)}, offload="host", offload_update="host")
    assert isinstance(p.offload.place, HostUpdate)
    elements = sum(leaf.size for states in p.init().group_states for state in states for leaf in jax.tree.leaves(state))
    assert elements == 3 * sum(group.elements for made in p.offload.groups for group in made)


def test_copies_of_weights_on_devices_are_compared():
    p = make_program({"precision": MIXED, "parallel": parallel(data=2)}, offload="host")
    state, check = p.init(), ReplicaCheck(p)
    assert check.has_copies()
    check.check(state, 1)
    with pytest.raises(ReplicaError, match=r"copies differ: params\.embedding\.tokens"):
        check.check(with_flip(state, 1), 1)


def test_groups_have_every_matrix_once_and_no_more_than_they_may():
    config = make_config(model={"layers": 5}, parallel={"data": 1}, precision=FLOAT32)
    plan = abstract_plan(config, 1, "cpu", "")
    made = groups.groups_of(groups.offloaded_parameters(plan), 1)
    layers = {}
    for group in (group for of_one in made for group in of_one):
        assert group.elements <= groups.GROUP_ELEMENTS or (len(group.paths), (group.layers or (0, 1))[1]) == (1, 1)
        for path in group.paths:
            layers.setdefault(path, []).append(group.layers)
    assert layers.keys() == {each.path for each in plan.parameters if len([n for n in each.names if n != "layers"]) > 1}
    for path, parts in layers.items():
        ends = [0] + [start + number for start, number in filter(None, parts)]
        assert parts == [None] or ([start for start, _ in parts] == ends[:-1] and ends[-1] == 5), path
    assert any(parts != [None] for parts in layers.values())
    whole = groups.groups_of(groups.offloaded_parameters(plan), 1, split=False)
    assert all(group.layers is None for of_one in whole for group in of_one)


def test_nothing_to_offload_is_an_error():
    config = make_config(
        optim={"offload": "host", "freeze": "embedding.* blocks.*.query blocks.*.key blocks.*.value *.out *.up *.down"},
        precision=FLOAT32,
    )
    with pytest.raises(ConfigError, match=r"optim\.offload=host: no matrix is trained, and vectors stay"):
        abstract_plan(config, 1, "cpu", "")


@slow
def test_orbax_computes_nothing_with_arrays_on_the_host(tmp_path, monkeypatch):
    """It would slice arrays of which devices have copies, so that each writes a part, if the last dimension is one of
    its sizes."""
    sizes = {"model": {"width": 128, "heads": 4}, "parallel": parallel(data=2)}
    p = make_program({"precision": MIXED} | sizes, offload="host")
    data, sliced = replica_slices.ReplicaSlice.data, []

    def watched(self):
        sliced.append(self.slice_args is not None and self.unsliced_data.sharding.memory_kind == PINNED)
        return data(self)

    monkeypatch.setattr(replica_slices.ReplicaSlice, "data", watched)
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(0, p.canonical(p.init()), make_meta({}, 0, ""))
    checkpoints.close()
    assert sliced and not any(sliced)
