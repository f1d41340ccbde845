"""GPT in a training loop of one's own, on data 4 x model 2: a mesh, jax.jit and optax.  See docs/own-loop.md."""

import sys

import jax
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd_lm

config = spmd_lm.load_config("configs/debug.yaml", *sys.argv[1:])
model = spmd_lm.make_model(config)
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Explicit))
optimizer = optax.chain(
    optax.clip_by_global_norm(config.optim.clip), optax.adamw(config.optim.lr, 0.9, 0.95, weight_decay=0)
)


@jax.jit
def step(params, opt_state, batch, i):
    dropout = (config.train.seed, i)
    loss, gradients = jax.value_and_grad(model.mean_loss)(params, batch, dropout)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


with jax.set_mesh(mesh), spmd_lm.axis_rules(batch="data", heads="model", mlp="model", vocab="model"):
    params = jax.device_put(model.init(config.train.seed), spmd_lm.param_shardings(model))
    opt_state = optimizer.init(params)
    for i in range(config.train.steps):
        batch = jax.device_put(spmd_lm.read_batch(config, i + 1), NamedSharding(mesh, P("data")))
        params, opt_state, loss = step(params, opt_state, batch, i)
        print(float(loss))
