"""A GPT train step written by hand, the reference of the benchmark: dict parameters, optax, one jit, no mesh.

Each choice is the fastest one measured on 2 CPU cores: activations as [batch x time, width] (a weight's gradient is
one 2-D matmul), one matmul for q, k and v, layers unrolled, causal attention in two blocks of queries, and a
cross-entropy that computes its gradients chunk by chunk and never holds all logits."""

import sys

import jax
import jax.numpy as jnp
import optax
import workload
from workload import SIZES, Sizes

CHUNKS = 4


def init_params(s: Sizes) -> dict:
    m = workload.matrices(s)

    def norm() -> dict:
        return {"scale": jnp.ones(s.width), "bias": jnp.zeros(s.width)}

    def layer(i: int) -> dict:
        qkv = jnp.concatenate([m[name][i] for name in ("query", "key", "value")], axis=1)
        weights = {"qkv": qkv, "out": m["out"][i], "up": m["up"][i], "down": m["down"][i]}
        dense = {name: {"w": jnp.asarray(w), "b": jnp.zeros(w.shape[1])} for name, w in weights.items()}
        return dense | {"norm1": norm(), "norm2": norm()}

    tables = {name: jnp.asarray(m[name]) for name in ("tokens", "positions")}
    return tables | {"layers": [layer(i) for i in range(s.layers)], "norm": norm()}


def layer_norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def dense(x, p):
    return x @ p["w"] + p["b"]


def attention(q, k, v):
    """Causal attention, [batch, heads, time, head width]; the first half of queries skips the second half of keys."""
    time, scale = q.shape[2], q.shape[-1] ** -0.5
    outputs = []
    for start, end in ((0, time // 2), (time // 2, time)):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q[:, :, start:end] * scale, k[:, :, :end])
        visible = jnp.arange(end) <= jnp.arange(start, end)[:, None]
        p = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        outputs.append(jnp.einsum("bhqk,bhkd->bhqd", p, v[:, :, :end]))
    return jnp.concatenate(outputs, axis=2)


def block(x, p, s: Sizes):
    def split_heads(y):
        return y.reshape(s.batch, s.context, s.heads, -1).swapaxes(1, 2)

    q, k, v = jnp.split(dense(layer_norm(x, p["norm1"]), p["qkv"]), 3, axis=1)
    a = attention(split_heads(q), split_heads(k), split_heads(v)).swapaxes(1, 2).reshape(x.shape)
    x = x + dense(a, p["out"])
    h = jax.nn.gelu(dense(layer_norm(x, p["norm2"]), p["up"]), approximate=False)
    return x + dense(h, p["down"])


@jax.custom_vjp
def cross_entropy(h, table, targets):
    """Mean over tokens.  h: [tokens, width]; table: [vocab, width]; targets: [tokens]."""
    return _cross_entropy(h, table, targets)[0]


def _cross_entropy(h, table, targets):
    n = len(targets)

    def one_chunk(d_table, chunk):
        x, y = chunk
        logits = x @ table.T
        maximum = logits.max(-1, keepdims=True)
        e = jnp.exp(logits - maximum)
        normalizer = e.sum(-1, keepdims=True)
        nll = jnp.log(normalizer) + maximum - jnp.take_along_axis(logits, y[:, None], 1)
        g = (e / normalizer - (jnp.arange(len(table)) == y[:, None])) / n
        return d_table + g.T @ x, (nll.sum(), g @ table)

    def chunks(a):
        return a.reshape(CHUNKS, n // CHUNKS, *a.shape[1:])

    d_table, (nll, d_h) = jax.lax.scan(one_chunk, jnp.zeros_like(table), (chunks(h), chunks(targets)))
    return nll.sum() / n, (d_h.reshape(h.shape), d_table)


def _cross_entropy_backward(gradients, g):
    d_h, d_table = gradients
    return g * d_h, g * d_table, None


cross_entropy.defvjp(_cross_entropy, _cross_entropy_backward)


def loss(params, inputs, targets, s: Sizes):
    x = (params["tokens"][inputs] + params["positions"]).reshape(-1, s.width)
    for p in params["layers"]:
        x = block(x, p, s)
    return cross_entropy(layer_norm(x, params["norm"]), params["tokens"], targets.reshape(-1))


def main(name: str) -> None:
    s = SIZES[name]
    params = init_params(s)
    decayed = jax.tree.map(lambda p: p.ndim == 2, params)
    adamw = optax.adamw(
        workload.LR, workload.B1, workload.B2, workload.EPS, weight_decay=workload.WEIGHT_DECAY, mask=decayed
    )
    state = [params, adamw.init(params)]
    inputs, targets = map(jnp.asarray, workload.tokens(s))

    def update(params, moments, inputs, targets):
        value, grads = jax.value_and_grad(loss)(params, inputs, targets, s)
        updates, moments = adamw.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*state, inputs, targets).compile()
    del params

    def step() -> float:
        *state[:], value = jax.block_until_ready(compiled(*state, inputs, targets))
        return float(value)

    workload.serve(step)


if __name__ == "__main__":
    main(sys.argv[1])
