"""GPT and AdamW written out for one device: full logits, full masks, no mesh, nothing shared with what it judges.

It takes the package's tree of parameters and returns the same tree, so that every leaf can be compared.  Legend of
shapes: B batch, T time, S keys' time, H heads, K head width."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from spmd_lm.config.schema import AdamW, Model

ATTENTION, AFTER_ATTENTION, AFTER_MLP, AFTER_EMBEDDING = range(4)  # dropout sites


def bits(*counters) -> jax.Array:
    """What a chain of threefry blocks makes of counters (key, key), (count, count), ...; they broadcast."""
    shape = np.broadcast_shapes(*(np.shape(c) for c in counters))
    key, *rest = zip(*[iter(jnp.broadcast_to(c, shape).astype(jnp.uint32) for c in counters)] * 2, strict=True)
    for pair in rest:
        key = threefry2x32_p.bind(*key, *pair)
    return key[0]


class Draw:
    """Dropout of one step: `run` is (seed, step); samples [B] number the rows within the global batch."""

    def __init__(self, run, samples):
        self.run, self.samples = run, samples

    def hidden(self, x, rate, layer, site):
        """x: [B, T, width]."""
        row, column = (np.arange(n) for n in x.shape[1:])
        counters = (*self.run, layer, site, self.samples[:, None, None], 0, row[:, None], column)
        return self._drop(x, rate, counters)

    def probabilities(self, p, rate, layer):
        """p: [B, H, T, S]."""
        head, row, column = (np.arange(n) for n in p.shape[1:])
        sample, head = self.samples[:, None, None, None], head[:, None, None]
        return self._drop(p, rate, (*self.run, layer, ATTENTION, sample, head, row[:, None], column))

    @staticmethod
    def _drop(x, rate, counters):
        return jnp.where(bits(*counters) >= round(rate * 2**32), x / (1 - rate), 0)


def norm(x, p):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * p["scale"] + p.get("bias", 0)


def gelu(x, kind):
    if kind == "gelu":
        return x * (1 + jax.lax.erf(x / math.sqrt(2))) / 2
    return x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def attention(q, k, v, heads, segments=None, drop=lambda p: p):
    """Causal; q, k, v: [B, T, H x K]."""
    split = lambda x: x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)  # noqa: E731
    q, k, v = split(q), split(k), split(v)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    seen = np.tri(scores.shape[-1], dtype=bool)
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    p = drop(jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1))
    return (p @ v).transpose(0, 2, 1, 3).reshape(*v.shape[:1], v.shape[2], -1)


def logits(params, c: Model, tokens, draw: Draw | None = None):
    """tokens: [B, T] -> [B, T, vocab]."""
    hidden = lambda x, layer, site: draw.hidden(x, c.dropout, layer, site) if draw else x  # noqa: E731
    embedding, head = params["embedding"], params["head"]
    x = hidden(embedding["tokens"][tokens] + embedding["positions"][: tokens.shape[1]], 0, AFTER_EMBEDDING)
    for layer in range(c.layers):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        a, m = p["attention"], p["mlp"]
        h = norm(x, p["norm1"])
        q, k, v = (h @ a[name] + a.get(f"{name}_bias", 0) for name in ("query", "key", "value"))
        drop = lambda w, layer=layer: draw.probabilities(w, c.attention_dropout, layer) if draw else w  # noqa: E731
        y = attention(q, k, v, c.heads, drop=drop) @ a["out"].T + a.get("out_bias", 0)
        x = x + hidden(y, layer, AFTER_ATTENTION)
        h = gelu(norm(x, p["norm2"]) @ m["up"] + m.get("up_bias", 0), c.activation)
        x = x + hidden(h @ m["down"].T + m.get("down_bias", 0), layer, AFTER_MLP)
    return norm(x, head["norm"]) @ head.get("tokens", embedding["tokens"]).T


def loss(params, c: Model, tokens, targets, weights, draw: Draw | None = None):
    """Weighted mean negative log-likelihood, in nats."""
    every = jax.nn.log_softmax(logits(params, c, tokens, draw), axis=-1)
    nll = -jnp.take_along_axis(every, targets[..., None], axis=-1)[..., 0]
    return (weights * nll).sum() / weights.sum()


def learning_rate(o: AdamW, steps: int, step: int) -> float:
    """Of the update after `step` updates."""
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    end = o.decay_steps or steps
    done = min(1.0, (step - o.warmup) / max(1, end - o.warmup))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[o.decay]
    return o.lr if o.decay == "constant" else o.min_lr + (o.lr - o.min_lr) * left


def adamw(o: AdamW, steps: int, step: int, params, mu, nu, grads):
    """One update of trees whose vectors are called ...bias or scale: the new params, mu, nu; the gradients' norm."""
    size = math.sqrt(sum(float((np.asarray(g) ** 2).sum()) for g in jax.tree.leaves(grads)))
    shrink = min(1.0, o.clip / size) if o.clip else 1.0
    rate, n = learning_rate(o, steps, step), step + 1

    def update(path, p, m, v, g):
        m = o.b1 * m + (1 - o.b1) * (g * shrink)
        v = o.b2 * v + (1 - o.b2) * (g * shrink) ** 2
        move = (m / (1 - o.b1**n)) / (np.sqrt(v / (1 - o.b2**n)) + o.eps)
        vector = path[-1].key.endswith(("bias", "scale"))
        return p - rate * (move + (0 if vector else o.weight_decay) * p), m, v

    trees = jax.tree_util.tree_map_with_path(update, params, mu, nu, jax.tree.map(np.asarray, grads))
    return (*(jax.tree.map(lambda t, i=i: t[i], trees, is_leaf=lambda t: isinstance(t, tuple)) for i in range(3)), size)
