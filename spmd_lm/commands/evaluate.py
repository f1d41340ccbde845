"""`spmd-lm eval`: metrics of a run's newest checkpoint on its validation data."""

import math

from spmd_lm.commands.common import Arguments, add_fallback, load_configuration, write_result
from spmd_lm.errors import NonFiniteError


def run(arguments: Arguments) -> int:
    from spmd_lm.api import evaluate

    config = load_configuration(arguments)
    result = evaluate(config, arguments.fallback)
    width = max(16, *(len(key) + 2 for key in result))
    code = write_result(arguments, result, "\n".join(f"{key:<{width}}{value:,.10g}" for key, value in result.items()))
    if not math.isfinite(result["eval_loss"]):
        raise NonFiniteError(
            f"{config.run.directory}: at step {result['step']} eval_loss is {result['eval_loss']:g}. Lower optim.lr, "
            "lengthen optim.warmup, or set precision.compute=float32, and train again in a new run.dir."
        )
    return code


add_options = add_fallback
