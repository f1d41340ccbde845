"""Language models and AdamW written out for one device: full logits, full masks, no mesh, and no code shared with the
package that it checks.

It takes the package's tree of parameters and returns the same tree, so that every leaf can be compared.  Legend of
shapes: B batch, T time, S keys' time, H heads, K head width."""

import fnmatch
import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from spmd_lm.batch import Batch
from spmd_lm.config.schema import AdamW, Model, RunConfig

ATTENTION, AFTER_ATTENTION, AFTER_MLP, AFTER_EMBEDDING, AFTER_POOLER = range(5)  # dropout sites


def bits(*counters) -> jax.Array:
    """Random bits: a chain of threefry blocks over counters (key, key), (count, count), ...; they broadcast."""
    shape = np.broadcast_shapes(*(np.shape(c) for c in counters))
    key, *rest = zip(*[iter(jnp.broadcast_to(c, shape).astype(jnp.uint32) for c in counters)] * 2, strict=True)
    for pair in rest:
        key = threefry2x32_p.bind(*key, *pair)
    return key[0]


class Dropout:
    """The dropout of one step: `run` is (seed, step); sample_ids [B] are the rows' indices in the global batch."""

    def __init__(self, run, sample_ids):
        self.run, self.sample_ids = run, sample_ids

    def hidden(self, x, rate, layer, site):
        """x: [B, T, width]."""
        row, column = (np.arange(n) for n in x.shape[1:])
        counters = (*self.run, layer, site, self.sample_ids[:, None, None], 0, row[:, None], column)
        return self._drop(x, rate, counters)

    def probabilities(self, p, rate, layer):
        """p: [B, H, T, S]."""
        head, row, column = (np.arange(n) for n in p.shape[1:])
        sample, head = self.sample_ids[:, None, None, None], head[:, None, None]
        return self._drop(p, rate, (*self.run, layer, ATTENTION, sample, head, row[:, None], column))

    @staticmethod
    def _drop(x, rate, counters):
        return jnp.where(bits(*counters) >= round(rate * 2**32), x / (1 - rate), 0)


def norm(x, p, c: Model | None = None):
    eps, kind = (c.norm_eps, c.norm_type) if c else (1e-5, "layer")
    if kind == "rms":
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"]
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + eps) * p["scale"] + p.get("bias", 0)


def gelu(x, kind):
    if kind == "gelu":
        return x * (1 + jax.lax.erf(x / math.sqrt(2))) / 2
    return x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def rotate(x, positions, theta):
    """x: [B, H, T, K], each pair of features as a complex number, times e^(i x position x frequency)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] / theta ** (np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles)
    return jnp.concatenate([z.real, z.imag], axis=-1)


def attention(
    q, k, v, heads, segments=None, drop=lambda p: p, causal=True, rotary=lambda x: x, span=None, scale=None, cap=None
):
    """q: [B, T, H x K]; k, v: as many heads, or fewer that serve several queries each.  span: of a window."""

    def split(x):
        return x.reshape(*x.shape[:2], -1, q.shape[-1] // heads).transpose(0, 2, 1, 3)

    q_, k, v = rotary(split(q)), rotary(split(k)), split(v)
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) if heads > x.shape[1] else x for x in (k, v))
    scores = q_ @ k.swapaxes(-1, -2) * (scale or 1 / math.sqrt(q_.shape[-1]))
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    mask = np.tri(scores.shape[-1], dtype=bool) if causal else np.ones(scores.shape[-2:], bool)
    if span:
        place = np.arange(scores.shape[-1])
        mask = mask & (place[:, None] < place + span) & (place < place[:, None] + span)
    if segments is not None:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
    p = drop(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1))
    return (p @ v).transpose(0, 2, 1, 3).reshape(q.shape)


def mixture(x, p, c: Model, moe, real, training):
    """(output, balance loss, z-loss, dropped choices) of experts, token by token.  x: [B, T, width].  Losses are means
    over rows.  real: [B, T], 0 for padding.  training: whether experts have a capacity."""
    rows, time, _ = x.shape
    group = moe.group or time
    capacity = group
    if training and moe.capacity != "none":
        capacity = math.ceil(round(moe.capacity * moe.per_token * group / moe.experts, 9))
    z = x @ p["router"]
    probabilities = jnp.exp(z) / jnp.exp(z).sum(-1, keepdims=True)
    chosen = jnp.argsort(-probabilities, axis=-1, stable=True)[..., : moe.per_token]
    gates = jnp.take_along_axis(probabilities, chosen, axis=-1)
    gates = gates / gates.sum(-1, keepdims=True) if moe.renormalize else gates
    is_chosen = (chosen[..., None] == np.arange(moe.experts)) & real[..., None, None].astype(bool)  # [B, T, k, E]
    # Those ahead of a choice: of a lower rank in its group, or of its rank and an earlier token.
    in_turn = is_chosen.reshape(rows, -1, group, moe.per_token, moe.experts).swapaxes(2, 3)
    ahead = jnp.cumsum(in_turn.reshape(rows, time // group, -1, moe.experts), axis=2).reshape(in_turn.shape) - in_turn
    ahead = ahead.swapaxes(2, 3).reshape(is_chosen.shape)
    kept = is_chosen & (ahead < capacity)
    weight = (kept * gates[..., None]).sum(2)  # [B, T, E]
    y = 0
    for expert in range(moe.experts):
        e = {name: leaf[expert] for name, leaf in p["experts"].items()}
        y = y + weight[..., expert, None] * dense_mlp(x, e, c)
    if moe.shared:
        of_all = dense_mlp(x, p["shared"], c)
        y = y + (of_all / (1 + jnp.exp(-(x @ p["shared_gate"])[..., None])) if moe.shared_gate else of_all)
    tokens = real.sum(1, keepdims=True)
    share = is_chosen.sum((1, 2)) / tokens / moe.per_token  # [B, E]
    mean = (probabilities * real[..., None]).sum(1) / tokens
    squares = (jnp.log(jnp.exp(z).sum(-1)) ** 2 * real).sum(1, keepdims=True) / tokens
    return y, moe.experts * (share * mean).sum(-1).mean(), squares.mean(), is_chosen.sum() - kept.sum()


def dense_mlp(h, m, c: Model):
    up = h @ m["up"] + m.get("up_bias", 0)
    if c.activation == "swiglu":
        gate = h @ m["gate"] + m.get("gate_bias", 0)
        up = up * gate / (1 + jnp.exp(-gate))
    else:
        up = gelu(up, c.activation)
    return up @ m["down"].T + m.get("down_bias", 0)


def layer_of(params, c: Model, layer: int):
    """(kind, parameters) of one layer.  Stacks are by place in the period, if there are several kinds."""
    if not c.period:
        return None, jax.tree.map(lambda leaf: leaf[0 if c.share_layers else layer], params["blocks"])
    kind, stack = c.period[layer % len(c.period)], params["blocks"]
    if "norm1" not in stack:
        place = layer % len(stack)
        (stack,), layer = (each for name, each in stack.items() if name.startswith(f"{place}_")), layer // len(stack)
    return kind, jax.tree.map(lambda leaf: leaf[layer], stack)


def hidden_states(params, c: Model, batch, dropout: Dropout | None = None, auxiliary: dict | None = None):
    """The output of the last block, [B, T, width].  batch: a Batch of [B, ...].  auxiliary: in training, sums of what
    `mixture` returns, by name."""

    def drop(x, layer, site):
        return dropout.hidden(x, c.dropout, layer, site) if dropout else x

    embedding = params["embedding"]
    x = embedding["tokens"][batch.tokens]
    x = x + embedding["positions"][batch.positions] if c.positions == "learned" else x
    x = x + embedding["types"][batch.token_type_ids] if c.token_types else x
    x = drop(norm(x, embedding["norm"], c) if c.norm == "post" else x, 0, AFTER_EMBEDDING)
    for layer in range(c.layers):
        kind, p = layer_of(params, c, layer)
        heads, theta = getattr(kind, "heads", None) or c.heads, getattr(kind, "rope_theta", None) or c.rope_theta

        def rotary(x, theta=theta):
            return rotate(x, batch.positions, theta) if c.positions == "rotary" else x

        def drop_weights(w, layer=layer):
            return dropout.probabilities(w, c.attention_dropout, layer) if dropout else w

        span, cap = getattr(kind, "span", None), c.attention_softcap
        how = {"segments": batch.segments, "drop": drop_weights, "causal": c.kind == "gpt"}
        how |= {"heads": heads, "rotary": rotary, "span": span, "cap": cap}

        def attend(h, a=p["attention"], how=how):
            q, k, v = (h @ a[name] + a.get(f"{name}_bias", 0) for name in ("query", "key", "value"))
            y = attention(q, k, v, **how)
            return y @ a["out"].T + a.get("out_bias", 0)

        moe = getattr(kind, "mlp", None) or c.mlp

        def mlp(h, m=p["mlp"], moe=moe):
            if moe.kind == "dense":
                return dense_mlp(h, m, c)
            real = np.ones(h.shape[:2]) if batch.segments is None else batch.segments != 0
            y, balance, z, dropped = mixture(h, m, c, moe, real, auxiliary is not None)
            if auxiliary is not None:
                auxiliary["balance"] += moe.balance_loss * balance
                auxiliary["router_z"] += moe.z_loss * z
                auxiliary["dropped_tokens"] += dropped
            return y

        for branch, name, site in ((attend, "norm1", AFTER_ATTENTION), (mlp, "norm2", AFTER_MLP)):
            if c.norm == "pre":
                x = x + drop(branch(norm(x, p[name], c)), layer, site)
            else:
                x = norm(x + drop(branch(x), layer, site), p[name], c)
    return norm(x, params["head"]["norm"], c) if c.norm == "pre" else x


def rounded(params, config: RunConfig):
    """The parameters with all matrices of blocks rounded in blocks of 64 inputs, and gradients as if they were not."""
    most = {"none": 0, "int8": 127, "int4": 7}[config.precision.fake_quant]

    def of_matrix(path, w):
        name = path[-1].key
        if not most or w.ndim != 3 or path[0].key != "blocks":
            return w
        rows = w if name in ("out", "down") else w.swapaxes(1, 2)  # [layers, outputs, inputs]
        blocks = rows.reshape(*rows.shape[:2], -1, 64)
        step = jnp.abs(blocks).max(-1, keepdims=True) / most
        near = (jnp.round(blocks / step) * step).reshape(rows.shape)
        return w + jax.lax.stop_gradient((near if name in ("out", "down") else near.swapaxes(1, 2)) - w)

    return jax.tree_util.tree_map_with_path(of_matrix, params)


def predictions(params, config: RunConfig, batch, dropout: Dropout | None = None, auxiliary: dict | None = None):
    """Logits by loss: tokens [B, T, vocab], sentence order [B, 2], tasks as `task_logits`."""
    c, head, h = config.model, params["head"], hidden_states(params, config.model, batch, dropout, auxiliary)
    if config.objective.kind in ("classification", "multiple_choice", "span"):
        return task_logits(head, config, h, batch, dropout)
    table = head.get("tokens", params["embedding"]["tokens"])
    if config.objective.kind == "causal_lm":
        return {"causal_lm": h @ table.T}
    kind = c.activation if c.activation != "swiglu" else "gelu"
    t = norm(gelu(h @ head["transform"] + head.get("transform_bias", 0), kind), head["transform_norm"], c)
    logits_by_loss = {"masked_lm": t @ table.T + head.get("output_bias", 0)}
    if config.objective.sentence_order:
        pooled = jnp.tanh(h[:, 0] @ head["pooler"] + head.get("pooler_bias", 0))
        logits_by_loss["sentence_order"] = pooled @ head["binary"] + head.get("binary_bias", 0)
    return logits_by_loss


def task_logits(head, config: RunConfig, h, batch, dropout: Dropout | None):
    """Logits of classes [B, classes], of choices [B / choices, choices], or of spans [B, T, 2]."""
    kind = config.objective.kind
    if kind != "span":
        h = jnp.tanh(h[:, :1] @ head["pooler"] + head.get("pooler_bias", 0))
        h = dropout.hidden(h, config.model.dropout, 0, AFTER_POOLER) if dropout else h
    z = h @ head["output"] + head.get("output_bias", 0)
    if kind == "span":
        return {kind: jnp.where(batch.segments[..., None] == 1, z, -jnp.inf)}
    return {kind: z[:, 0] if kind == "classification" else z.reshape(-1, config.objective.choices)}


def logits(params, c: Model, tokens):
    """Logits of a causal model.  tokens: [B, T] -> [B, T, vocab]."""
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    h = hidden_states(params, c, Batch(tokens, None, None, positions, None, None))
    return h @ params["head"].get("tokens", params["embedding"]["tokens"]).T


def loss(params, config: RunConfig, batch, dropout: Dropout | None = None):
    """`loss_and_dropped` without the latter."""
    return loss_and_dropped(params, config, batch, dropout)[0]


def loss_and_dropped(params, config: RunConfig, batch, dropout: Dropout | None = None):
    """The sum of the objective's losses, each a weighted mean negative log-likelihood, in nats, and of experts' losses;
    and the number of choices that experts drop."""
    auxiliary = defaultdict(float)
    logits = predictions(rounded(params, config), config, batch, dropout, auxiliary)
    total = auxiliary["balance"] + auxiliary["router_z"]
    for name, z in logits.items():
        if not config.objective.predicts_tokens:
            z = z.swapaxes(1, 2) if name == "span" else z[:, None]  # [rows, labels of a row, classes]
            step = batch.labels.shape[0] // z.shape[0]
            labels = jnp.stack([batch.labels, batch.end_positions][: z.shape[1]], axis=1)[::step]
            nll = -jnp.take_along_axis(jax.nn.log_softmax(z, axis=-1), labels[..., None], axis=-1)[..., 0].mean(1)
            mean = (batch.label_weights[::step] * nll).sum() / batch.label_weights.sum(dtype=np.float64)
            return total + mean, auxiliary["dropped_tokens"]
        rows = name == "sentence_order"
        targets, weights = (batch.labels, batch.label_weights) if rows else (batch.targets, batch.loss_weights)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(z, axis=-1), targets[..., None], axis=-1)[..., 0]
        weights = weights.astype(np.float64)
        total = total + (weights * nll).sum() / weights.sum()
    return total, auxiliary["dropped_tokens"]


def trainable_mask(patterns, params):
    """0 for each parameter whose name matches one of these patterns, else 1; layers have an index."""

    def leaf_mask(path, leaf):
        first, *rest = (key.key for key in path)
        if first != "blocks":
            return float(not any(fnmatch.fnmatch(".".join([first, *rest]), p) for p in patterns))
        place, step = 0, 1
        if rest[0][0].isdigit():
            place, step, rest = int(rest[0].split("_")[0]), len(params["blocks"]), rest[1:]
        names = (".".join([first, str(place + i * step), *rest]) for i in range(leaf.shape[0]))
        each = [float(not any(fnmatch.fnmatch(name, p) for p in patterns)) for name in names]
        return np.array(each).reshape(-1, *[1] * (leaf.ndim - 1))

    return jax.tree_util.tree_map_with_path(leaf_mask, params)


def trained_part(patterns, params, tree):
    """Leaves of `tree`, shaped like the parameters, that are not wholly frozen: nested dicts."""

    def part(mask, tree):
        if isinstance(tree, dict):
            found = {name: part(mask[name], tree[name]) for name in tree}
            return {name: leaf for name, leaf in found.items() if leaf is not None}
        return tree if np.any(mask) else None

    return part(trainable_mask(patterns, params), tree)


def learning_rate(o: AdamW, steps: int, step: int) -> float:
    """The learning rate of the update after `step` updates."""
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    end = o.decay_steps or steps
    start = o.warmup if o.decay_start is None else o.decay_start
    done = max(0.0, min(1.0, (step - start) / max(1, end - start)))
    falls = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "sqrt": 1 - math.sqrt(done)}
    left = 1.0 if o.decay == "constant" else falls[o.decay]
    return o.lr if o.decay == "constant" else o.min_lr + (o.lr - o.min_lr) * left


def adamw(o: AdamW, steps: int, step: int, params, mu, nu, grads):
    """An update of trees, whose vectors are called ...bias or scale: the new params, mu, nu; the gradients' norm."""
    trainable = trainable_mask(o.freeze.split(), params)
    grads = jax.tree.map(lambda g, trains: np.asarray(g) * trains, grads, trainable)
    size = math.sqrt(sum(float((np.asarray(g) ** 2).sum()) for g in jax.tree.leaves(grads)))
    shrink = min(1.0, o.clip / size) if o.clip else 1.0
    rate, n = learning_rate(o, steps, step), step + 1

    def update(path, p, m, v, g, trainable):
        m = np.where(trainable, o.b1 * m + (1 - o.b1) * (g * shrink), m)
        v = np.where(trainable, o.b2 * v + (1 - o.b2) * (g * shrink) ** 2, v)
        move = (m / (1 - o.b1**n)) / (np.sqrt(v / (1 - o.b2**n)) + o.eps)
        vector = path[-1].key.endswith(("bias", "scale", "shared_gate"))
        return p - rate * (move + (0 if vector else o.weight_decay) * p) * trainable, m, v

    trees = jax.tree_util.tree_map_with_path(update, params, mu, nu, grads, trainable)
    return (*(jax.tree.map(lambda t, i=i: t[i], trees, is_leaf=lambda t: isinstance(t, tuple)) for i in range(3)), size)
