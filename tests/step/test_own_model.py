"""User modules: the examples of docs/own-model.md compute under every layout what they do on one device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.errors import ConfigError, LayoutError
from spmd_lm.generation.generate import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.step.own_check import check_own_modules
from spmd_lm.step.program import Program
from tests.helpers import (
    assert_close,
    assert_states_close,
    canonical,
    device_batch,
    host_batch,
    make_config,
    program,
    trained,
)
from tests.own import MIXER, PAGE, example, write_example, write_module

pytestmark = pytest.mark.usefixtures("x64")

SLOW = pytest.mark.slow
COMMON = {"layers": 8, "width": 16, "heads": 4, "kv_heads": 4, "positions": "rotary"}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
DRAWN = {
    "tensor": {"data": 4, "model": 2},
    "sequence": {"data": 2, "model": 4, "sequence": True, "zero": 1},
    "zero3": {"data": 8, "zero": 3},
    "zero3 of sequences, prefetched": {"data": 2, "model": 2, "sequence": True, "zero": 3, "prefetch": "on"},
    "hybrid": {"replica": 2, "data": 2, "model": 2, "zero": 3, "microbatches": 2},
    "types": {"data": 2, "model": 2, "sequence": True, "zero": 2, "partitioner": "types"},
    "1f1b": {"pipe": 2, "data": 2, "model": 2, "zero": 3, "microbatches": 2},
    "gpipe": {"pipe": 4, "data": 2, "microbatches": 4, "schedule": "gpipe"},
    "interleaved": {"pipe": 2, "data": 2, "zero": 1, "microbatches": 2, "schedule": "interleaved", "chunks": 2},
    "breadth first": {"pipe": 2, "data": 2, "zero": 3, "microbatches": 2, "schedule": "breadth_first", "chunks": 2},
}
REMAT = {"hybrid": "full", "tensor": "selective", "zero3": "residual"}


@pytest.fixture(scope="module")
def gptj(tmp_path_factory) -> str:
    return write_example(tmp_path_factory.mktemp("own"), "GPTJBlock")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.mutants if name == "zero3 of sequences, prefetched" else SLOW)
        for name in DRAWN
    ],
)
@pytest.mark.slow
def test_every_layout_computes_the_same(gptj, layout):
    """Dropout is on; it is a function of a token's place."""
    sections = {"model": COMMON | {"module": gptj, "dropout": 0.1}, "optim": {"eps": 1e-6}}
    remat = {"policy": REMAT.get(layout, "none")}
    got = trained(make_config(parallel=DRAWN[layout], remat=remat, **sections))
    want = trained(make_config(parallel={"data": 1}, **sections))
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)


def test_the_block_computes_what_its_equation_says(gptj):
    config = make_config(model=COMMON | {"module": gptj, "positions": "learned"} | NO_DROPOUT, parallel={"data": 1})
    p = program(config)
    params, batch = jax.device_get(p.init().params), host_batch(config, 0)

    def norm(x, scale, bias):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.model.norm_eps) * scale + bias

    def block(x, w):
        h = norm(x, w["norm"]["scale"], w["norm"]["bias"])
        q, k, v = ((h @ w[name]).reshape(*h.shape[:2], 4, 4).swapaxes(1, 2) for name in ("query", "key", "value"))
        scores = q @ k.swapaxes(2, 3) / 2
        scores = np.where(np.tri(h.shape[1], dtype=bool), scores, -np.inf)
        attended = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(h.shape)
        hidden = jax.nn.gelu(h @ w["up"] + w["up_bias"], approximate=True)
        return x + attended @ w["out"].T + hidden @ w["down"].T + w["down_bias"]

    x = params["embedding"]["tokens"][batch.tokens] + params["embedding"]["positions"][batch.positions]
    for layer in range(config.model.layers):
        x = block(x, jax.tree.map(lambda w, layer=layer: w[layer], params["blocks"]))
    h = norm(x, params["head"]["norm"]["scale"], params["head"]["norm"]["bias"])
    logits = jax.nn.log_softmax(h @ params["embedding"]["tokens"].T)
    nll = -np.take_along_axis(np.asarray(logits), np.asarray(batch.targets)[..., None], -1)[..., 0]
    weights = np.asarray(batch.loss_weights, np.float64)
    want = (nll * weights).sum() / weights.sum()
    _, metrics = p.step(p.init(), device_batch(p, 0))
    assert float(metrics["loss"]) == pytest.approx(want, rel=1e-12)


def test_the_example_is_short():
    assert len(example("GPTJBlock").splitlines()) <= 80 and "model.module=gptj.py:GPTJBlock" in PAGE.read_text()


@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 2, "model": 4, "sequence": True, "zero": 3, "microbatches": 2},
        pytest.param({"pipe": 2, "data": 2, "model": 2, "microbatches": 2}, marks=SLOW),
    ],
)
@pytest.mark.slow
def test_a_dimension_and_an_auxiliary_loss_of_ones_own(tmp_path, parallel):
    """Generation equals full forward passes."""
    model = COMMON | {"module": write_module(tmp_path, "Mixer", MIXER), "layers": 2}
    p, one = (program(make_config(model=model, parallel=each)) for each in (parallel, {"data": 1}))
    assert p.plan.param_specs["blocks"]["up"][2] == "model"
    batch = host_batch(one.config, 0)
    (state, metrics), (want, of_one) = (each.step(each.init(), device_batch(each, 0)) for each in (p, one))
    assert_states_close(canonical(p, state), canonical(one, want), 1e-11)
    penalty = 2 * np.square(np.asarray(batch.tokens, float)).mean()
    for figures in (metrics, of_one):
        assert float(figures["penalty_loss"]) == pytest.approx(penalty, rel=1e-6)  # float32
        assert float(figures["causal_lm_loss"]) == pytest.approx(float(of_one["causal_lm_loss"]), rel=1e-12)
    assert p.evaluate(p.init().params, device_batch(p, 0)).keys() == {"causal_lm"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPTJBlock", "Mixer"])
def test_text_is_that_of_full_forward_passes(gptj, tmp_path, name):
    """Caches are of keys and values, or of tokens."""
    module = gptj if name == "GPTJBlock" else write_module(tmp_path, "Mixer", MIXER)
    p = program(make_config(model=COMMON | {"module": module}, parallel={"data": 2, "model": 2, "zero": 3}))
    params, context = jax.tree.map(lambda x: x * 8, p.init().params), p.config.model.context
    prompts = [np.arange(n, dtype=np.int32) for n in (1, 9)]
    texts = Generator(p, 2, Sampling(tokens=7, greedy=True)).generate(params, prompts)
    template = device_batch(p, 0)
    for text, prompt in zip(texts, prompts, strict=True):
        for end in range(len(prompt), len(text)):
            padded = jnp.broadcast_to(jnp.pad(text[:end], (0, context - end)), template.tokens.shape)
            batch = dataclasses.replace(template, tokens=jax.device_put(padded, p.batch_shardings.tokens))
            logits = np.asarray(p.forward(params, batch)["tokens"])[0, 0, end - 1]
            assert text[end] == logits.argmax()


@pytest.mark.slow
def test_an_objective_of_ones_own(tmp_path):
    """Training and evaluation have the loss of the same rows with no weight on the first half."""
    module = write_example(tmp_path, "LateTokens")
    model = {"layers": 1} | NO_DROPOUT
    objective = {"kind": "causal_lm", "module": module}
    own = program(make_config(model=model, objective=objective, parallel={"data": 4, "model": 2}))
    plain = program(make_config(model=model, parallel={"data": 1}))
    late = np.arange(own.config.model.context) >= own.config.model.context // 2
    batch = device_batch(plain, 0)
    masked = dataclasses.replace(batch, loss_weights=batch.loss_weights * late)
    (want,) = plain.evaluate(plain.init().params, masked).values()
    (sums,) = own.evaluate(own.init().params, device_batch(own, 0)).values()
    assert np.asarray(sums) == pytest.approx(np.asarray(want), rel=1e-12)
    _, metrics = own.step(own.init(), device_batch(own, 0))
    assert float(metrics["loss"]) == pytest.approx(float(want[0] / want[2]), rel=1e-12)


@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 2, "model": 2, "zero": 3},
        pytest.param({"pipe": 2, "data": 2, "microbatches": 2}, marks=SLOW),
    ],
)
@pytest.mark.slow
def test_an_optimizer_of_ones_own(tmp_path, parallel):
    """Layouts equal one device, and the update equals optax's alone."""
    optim = {"kind": "custom", "module": write_example(tmp_path, "signed_momentum")}
    optim |= {"lr": 1e-3, "decay": "constant", "weight_decay": 0.0, "clip": 0.0, "freeze": "blocks.0.*"}
    optim |= {"warmup": 0, "min_lr": 0.0}
    model = {"layers": 2, "use_bias": False}  # a gradient that is rounding alone, as of the keys' biases, has any sign
    got, want = (trained(make_config(model=model, optim=optim, parallel=each)) for each in (parallel, {"data": 1}))
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    for ours, theirs in ((got.last.params, want.last.params), (got.last.opt_state, want.last.opt_state)):
        assert_close(ours, theirs, 1e-11)
    moved = got.last.params["embedding"]["tokens"] - got.first.params["embedding"]["tokens"]
    assert np.abs(moved).max() <= 3e-3 * (1 + 1e-9) and not np.abs(moved - np.rint(moved * 1e3) / 1e3).max() > 1e-12
    assert int(got.last.updates) == 3
    assert (got.last.params["blocks"]["mlp"]["up"][0] == got.first.params["blocks"]["mlp"]["up"][0]).all()


RULES = """
import jax
import jax.numpy as jnp
import optax


def lamb():
    return optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio())


def adamw():
    return optax.adamw(1e-3)


def factored():
    return optax.scale_by_factored_rms(min_dim_size_to_factor=2)


def orthogonal():
    return optax.contrib.scale_by_muon()


def scheduled():
    return optax.adamw(optax.linear_schedule(0.0, 1e-3, 100))


def of_stacks():
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: g / jnp.linalg.norm(g) if g.ndim == 3 else g, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def by_a_constant():
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: g @ jnp.ones((g.shape[-1],) * 2) if g.ndim > 1 else g, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def above_a_norm():
    return optax.clip_by_global_norm(100.0)


def noisy():
    return optax.add_noise(0.1, 0.5, jax.random.key(0))


def number():
    return 3
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lamb", "reads other entries"),
        ("of_stacks", "reads other entries"),
        ("by_a_constant", "reads other entries"),
        ("above_a_norm", "reads other entries"),
        ("noisy", "is a random key"),
        ("scheduled", "points against the gradient"),
        ("adamw", "points against the gradient"),
        ("factored", "has the shape"),
        ("orthogonal", "has the shape"),
        ("number", "Name a function that returns"),
    ],
)
def test_rules_that_shards_cannot_compute_are_refused(tmp_path, name, reason):
    module = write_module(tmp_path, name, RULES)
    with pytest.raises(ConfigError, match=reason):
        Program(make_config(optim={"kind": "custom", "module": module}, parallel={"data": 1}), jax.devices()[:1])


BROKEN = {
    "no rule": ('init.matrix(8, "choices")', LayoutError, "no rule places the dimension 'choices'.*rules"),
    "no names": ("nnx.Param(init.vector(1, 8, 'mlp')[...])", ConfigError, "dimension names None"),
    "too few names": ("nnx.Param(init.matrix(8, 'mlp')[...], out_sharding=('width',))", ConfigError, "Name each"),
    "another width": ("nnx.Param(init.matrix(8, 'mlp')[...][:8], out_sharding=('width', 'mlp'))", LayoutError, "sizes"),
    "statistics": ("nnx.BatchStat(init.vector(1, 8, 'mlp')[...])", ConfigError, "no nnx.Param: BatchStat"),
}


@pytest.mark.parametrize(("parameter", "error", "reason"), BROKEN.values(), ids=BROKEN)
def test_parameters_that_no_layout_can_place_are_refused_by_name(tmp_path, parameter, error, reason):
    source = "from flax import nnx\n\n\nclass Broken(nnx.Module):\n    def __init__(self, init):\n"
    source += f"        self.w = {parameter}\n"
    with pytest.raises(error, match=reason):
        program(make_config(model={"module": write_module(tmp_path, "Broken", source)}, parallel={"data": 1}))


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("x", "returned float64[16, 16, 16]. Return x as it came"),
        ("(x[..., :8], {})", "returned (float64[16, 16, 8], {})"),
        ("(x.astype('float32'), {})", "returned (float32[16, 16, 16], {})"),
        ("(x, {'balance': x[:, 0, 0]})", "returned (float64[16, 16, 16], {balance: float64[16]})"),
    ],
)
def test_what_a_block_may_not_return_is_told(tmp_path, returned, told):
    source = "from flax import nnx\n\n\nclass Broken(nnx.Module):\n    def __init__(self, init):\n"
    source += "        self.w = init.vector(1, 8, 'mlp')\n\n    def __call__(self, x, context):\n"
    module = write_module(tmp_path, "Broken", f"{source}        return {returned}\n")
    p = program(make_config(model=COMMON | {"module": module}, parallel={"data": 1}))
    with pytest.raises(ConfigError, match=re.escape(f"Broken {told}")):
        p.train_step.lower(p.abstract_state(), p.abstract_batch())


def test_rows_that_devices_share_are_refused(gptj):
    with pytest.raises(LayoutError, match=r"modules of one's own.*Use parallel.context=1"):
        program(make_config(model=COMMON | {"module": gptj}, parallel={"context": 2}))


def test_losses_have_the_names_of_their_weights(tmp_path):
    source = example("LateTokens").replace('{"late_tokens": batch', '{"late": batch')
    module = write_module(tmp_path, "LateTokens", source)
    p = program(make_config(objective={"kind": "causal_lm", "module": module}, parallel={"data": 1}))
    with pytest.raises(ConfigError, match=r"loss_name=late_tokens, but loss_weights names late\. Give both"):
        p.train_step.lower(p.abstract_state(), p.abstract_batch())


def test_what_is_no_module_is_refused(tmp_path):
    module = write_module(tmp_path, "sample", example("sample"))
    with pytest.raises(ConfigError, match=r"subclass of flax\.nnx\.Module"):
        program(make_config(model={"module": module}, parallel={"data": 1}))


def test_a_class_is_a_model_without_a_file(gptj, tmp_path):
    namespace: dict = {}
    exec(example("GPTJBlock"), namespace)
    config = make_config(model=COMMON, parallel={"data": 1})
    own = Program(config, jax.devices()[:1], model=namespace["GPTJBlock"])
    of_file = program(make_config(model=COMMON | {"module": gptj}, parallel={"data": 1}))
    lowered = [each.train_step.lower(each.abstract_state(), each.abstract_batch()) for each in (own, of_file)]
    assert lowered[0].as_text() == lowered[1].as_text()


MISTAKES = {
    "no copy": ('copy_to_region(self.norm(x), "state")', "self.norm(x)"),
    "no sum": ('reduce_from_region(self.matrix("down").multiply(h, transpose=True), "state")', "h @ self.down[...].T"),
    "a sum over another name": ('transpose=True), "state")', 'transpose=True), "feature")'),
    "a parameter of all": ('init.vector(0.5, 24, "state")', 'init.vector(0.5, 1, "feature")'),
}


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(name, marks=() if name == "no copy" else SLOW) for name in MISTAKES],
)
def test_collectives_that_are_wrong_are_found_before_training(tmp_path, mistake):
    """A comparison with one device finds them, and passes the right block."""
    right, wrong = MISTAKES[mistake]

    def check(source):
        model = COMMON | {"layers": 2, "module": write_module(tmp_path, "Mixer", source)}
        p = program(make_config(model=model, parallel={"data": 2, "model": 2}))
        return check_own_modules(p.config, p.model.modules, p.plan)

    assert right in MIXER
    with pytest.raises(LayoutError, match=r"devices along `model` do not agree on|differs from that on one device"):
        check(MIXER.replace(right, wrong))
    assert check(MIXER) == ""
