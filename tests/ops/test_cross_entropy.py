import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.ops import cross_entropy as module
from spmd_lm.ops.cross_entropy import cross_entropy
from tests.helpers import assert_equal, over_model, relative

VOCAB, PADDED, WIDTH, ROWS, TIME = 61, 64, 12, 3, 20
R = np.random.default_rng(0)
H, TABLE = R.normal(size=(ROWS, TIME, WIDTH)), R.normal(size=(PADDED, WIDTH))
BIAS = R.normal(size=PADDED)
TARGETS = R.integers(0, VOCAB, (ROWS, TIME), dtype=np.int32)
WEIGHTS = np.maximum(R.uniform(-0.5, 2, (ROWS, TIME)), 0)


def plain(h, table, bias, targets, weights, vocab=VOCAB):
    every = jax.nn.log_softmax(h @ table[:vocab].T + bias[:vocab])
    return -(weights * jnp.take_along_axis(every, targets[..., None], -1)[..., 0]).sum()


def gradients(f):
    """Value and gradients of 3 f, so that what comes from above counts."""
    return lambda *args: jax.value_and_grad(lambda *a: 3 * f(*a), (0, 1, 2))(*args)


@pytest.fixture
def want(x64):
    return gradients(plain)(H, TABLE, BIAS, TARGETS, WEIGHTS)


def check(got, want, tolerance=1e-13):
    (value, gradients), (value_, gradients_) = got, want
    assert float(value) == pytest.approx(float(value_), rel=tolerance)
    for d, d_ in zip(gradients, gradients_, strict=True):
        assert relative(d, d_) < tolerance


def ours(h, table, bias, targets, weights):
    return cross_entropy(h, table, bias, targets, weights, VOCAB)


INS = ((), ("vocab", None), ("vocab",), (), ())
OUTS = ((), ((), ("vocab", None), ("vocab",)))


@pytest.mark.parametrize("chunk_rows", [1, 7, ROWS * TIME], ids="{} rows at a time".format)
@pytest.mark.parametrize("model", [1, 8, *(pytest.param(model, marks=pytest.mark.slow) for model in (2, 4))])
def test_value_and_gradients(model, chunk_rows, want, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_rows * PADDED // model * 8)
    got = over_model(gradients(ours), model, INS, OUTS)(H, TABLE, BIAS, TARGETS, WEIGHTS)
    check(got, want)
    assert not np.asarray(got[1][1])[VOCAB:].any()


@pytest.mark.parametrize("model", [1, 4])
def test_capped_logits(model, x64, monkeypatch):
    """Logits are 3 tanh(logits / 3), without padding; compared are the loss, its gradients, and evaluation's scores."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 7 * PADDED // model * 8)

    def capped(h, table, bias, targets, weights):
        every = jax.nn.log_softmax(3 * jnp.tanh((h @ table[:VOCAB].T + bias[:VOCAB]) / 3))
        return -(weights * jnp.take_along_axis(every, targets[..., None], -1)[..., 0]).sum()

    def ours(*args):
        return cross_entropy(*args, VOCAB, module.LogitsPolicy(softcap=3.0))

    args = H, TABLE, BIAS, TARGETS, WEIGHTS
    check(over_model(gradients(ours), model, INS, OUTS)(*args), gradients(capped)(*args))
    evaluate = over_model(lambda *args: module.evaluate_cross_entropy(*args, VOCAB, 3.0), model, INS, ((), ()))
    assert float(evaluate(*args)[0]) == pytest.approx(float(capped(*args)), rel=1e-13)
    score = over_model(lambda *args: module.score_targets(*args, VOCAB, 3.0), model, INS[:4], ((), ()))
    assert float(-(score(*args[:4])[0] * WEIGHTS).sum()) == pytest.approx(float(capped(*args)), rel=1e-13)


@pytest.mark.parametrize("model", [1, 8])
def test_padding_takes_no_probability(model, x64):
    """Padding may hold anything."""
    huge = np.concatenate([TABLE[:VOCAB], np.full((PADDED - VOCAB, WIDTH), 1e6)])
    got = [over_model(gradients(ours), model, INS, OUTS)(H, table, BIAS, TARGETS, WEIGHTS) for table in (huge, TABLE)]
    assert_equal(*got)


def test_the_value_without_gradients_is_the_same(want):
    """The program differs."""
    got = over_model(ours, 4, INS, ())(H, TABLE, BIAS, TARGETS, WEIGHTS)
    assert 3 * float(got) == pytest.approx(float(want[0]), rel=1e-14)


@pytest.mark.parametrize(
    ("tokens", "most", "number", "size"),
    [(60, 7, 9, 7), (64, 16, 4, 16), (61, 10, 7, 9), (8, 100, 1, 8), (3, 0.5, 3, 1)],
)
def test_chunks_are_few_and_equal(tokens, most, number, size, monkeypatch):
    """A prime number of tokens costs no more than its neighbours."""
    monkeypatch.setattr(module, "CHUNK_BYTES", most * 1000)
    assert module.chunks(tokens, 1000) == (number, size)


def test_large_logits_do_not_overflow(x64):
    got = over_model(gradients(ours), 2, INS, OUTS)(H * 1e4, TABLE, BIAS, TARGETS, WEIGHTS)
    check(got, gradients(plain)(H * 1e4, TABLE, BIAS, TARGETS, WEIGHTS), 1e-12)


def test_bfloat16_matrices_give_float32_losses(x64):
    low = [x.astype(jnp.bfloat16) for x in (H, TABLE, BIAS)]
    value, made = gradients(ours)(*low, TARGETS, WEIGHTS.astype(np.float32))
    assert value.dtype == jnp.float32 and {d.dtype for d in made} == {jnp.dtype(jnp.bfloat16)}
    want = gradients(plain)(*(x.astype(np.float64) for x in low), TARGETS, WEIGHTS)
    assert float(value) == pytest.approx(float(want[0]), rel=1e-6)  # products are exact in float32, sums nearly
    for d, d_ in zip(made, want[1], strict=True):
        assert relative(d.astype(np.float64), d_) < 2**-7


@pytest.mark.parametrize("model", [1, 4])
def test_scores_tell_the_weight_of_what_was_likeliest(model, x64):
    best = np.argmax(H @ TABLE[:VOCAB].T + BIAS[:VOCAB], axis=-1).astype(np.int32)
    targets = np.where(np.arange(TIME) % 3 == 0, best, TARGETS)
    run = over_model(lambda *args: module.evaluate_cross_entropy(*args, VOCAB), model, INS, ((), ()))
    loss, right = run(H, TABLE, BIAS, targets, WEIGHTS)
    assert float(loss) == pytest.approx(float(plain(H, TABLE, BIAS, targets, WEIGHTS)), rel=1e-13)
    assert float(right) == pytest.approx(WEIGHTS[targets == best].sum(), rel=1e-14)


@pytest.mark.parametrize("chunk_rows", [7, ROWS * TIME])
@pytest.mark.parametrize("model", [1, 2, 8])
def test_scores_of_each_target(model, chunk_rows, x64, monkeypatch):
    """Scores are log-likelihoods, and if argmax takes the target: the first of equal logits, whichever shard has it."""
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_rows * PADDED // model * 8)
    table, bias = TABLE.copy(), BIAS.copy()
    table[[5, 9, 40, 60]], bias[[5, 9, 40, 60]] = table[9], 30.0  # four equal ones, the likeliest, in several shards
    table[VOCAB:], bias[VOCAB:] = 0, 99.0  # padding is likelier still
    targets = np.where(np.arange(TIME) % 2 == 0, np.resize([5, 9, 40, 60], TIME), TARGETS).astype(np.int32)
    run = over_model(lambda *args: module.score_targets(*args, VOCAB), model, INS[:4], ((), ()))
    scores, greedy = run(H, table, bias, targets)
    every = jax.nn.log_softmax(H @ table[:VOCAB].T + bias[:VOCAB])
    np.testing.assert_allclose(scores, np.take_along_axis(every, targets[..., None], -1)[..., 0], rtol=1e-12)
    assert (np.asarray(greedy) == (targets == 5)).all() and np.asarray(greedy).any()


@pytest.mark.parametrize("vocab", [PADDED, VOCAB, 40])
def test_a_gpu_normalizes_in_one_pass(vocab, as_on_a_gpu, x64):
    """Shards have no padding, or some, or nothing else; logits are large."""
    args = H, 9 * TABLE, BIAS, TARGETS % vocab, WEIGHTS
    got = over_model(gradients(lambda *args: cross_entropy(*args, vocab)), 8, INS, OUTS)(*args)
    assert as_on_a_gpu
    check(got, gradients(lambda *args: plain(*args, vocab))(*args))


def test_products_write_logits_in_float32_or_in_the_compute_dtype(x64):
    low = [x.astype(jnp.bfloat16) for x in (H, TABLE, BIAS)]

    def run(compute):
        policy = module.LogitsPolicy(compute=compute)
        return jax.jit(gradients(lambda *args: module.cross_entropy(*args, VOCAB, policy)))

    def dots(compute):
        shape = f"-> tensor<{ROWS * TIME}x{PADDED}x"
        text = run(compute).lower(*low, TARGETS, np.float32(WEIGHTS)).as_text()
        return [line.rpartition("x")[2] for line in text.splitlines() if "dot_general" in line and shape in line]

    assert dots(False) == ["f32>"] and dots(True) == ["bf16>"]
    (wide, of_wide), (rounded, of_rounded) = (run(c)(*low, TARGETS, np.float32(WEIGHTS)) for c in (False, True))
    assert rounded.dtype == jnp.float32 and float(rounded) == pytest.approx(float(wide), rel=2**-8)
    for d, d_ in zip(of_rounded, of_wide, strict=True):
        assert relative(d.astype(np.float64), d_.astype(np.float64)) < 2**-6


@pytest.mark.parametrize("each", [8, 10, 128])
def test_a_policy_says_how_many_tokens(each, want):
    assert module.chunks(60, 1000, each) == (-(-60 // each), each)
    run = gradients(lambda *args: module.cross_entropy(*args, VOCAB, module.LogitsPolicy(tokens=each)))
    check(over_model(run, 2, INS, OUTS)(H, TABLE, BIAS, TARGETS, WEIGHTS), want)
