"""Constraints between sections of a configuration.

A check is a generator of problems.  Its parameter names say which sections it needs, so that it can run as soon as
those are valid.  A problem begins with the conflicting keys, as section.key=value, and ends with the nearest settings
that satisfy the check."""

import inspect
import re
from collections.abc import Callable, Mapping

from spmd_lm.config import layout_checks, objective_checks
from spmd_lm.config.attention_kernels import FUSED_KERNELS, obstacles
from spmd_lm.config.schema import Model, Optimizer, Precision, Section, Train
from spmd_lm.config.suggest import Problems, divisors, multiples, nearest

BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}


def heads_divide_width(model: Model) -> Problems:
    if model.width % model.heads:
        yield (
            f"model.width={model.width} is not divisible by model.heads={model.heads}. "
            f"Use {nearest('model.heads', model.heads, divisors(model.width))}, "
            f"or {nearest('model.width', model.width, multiples(model.width, model.heads))}."
        )


def rotary_heads_have_even_width(model: Model) -> Problems:
    if model.positions == "rotary" and model.width % model.heads == 0 and model.head_width % 2:
        even = [n for n in divisors(model.width) if model.width // n % 2 == 0]
        heads = f"{nearest('model.heads', model.heads, even)}, or " if even else ""
        yield (
            f"model.positions=rotary with model.width={model.width} and model.heads={model.heads}: heads are "
            f"{model.head_width} wide, but features are rotated in pairs. Use {heads}model.positions=learned."
        )


def kernel_supports_model(model: Model, precision: Precision) -> Problems:
    """Refuses an explicit choice that would fail later; `auto` falls back to XLA."""
    kernel = FUSED_KERNELS.get(model.attention)
    if kernel is not None:
        chosen = f"model.attention={model.attention}"
        for settings, reason, alternative in obstacles(kernel, model, precision.compute):
            ways = [alternative, "model.attention=xla"] if alternative else ["model.attention=xla"]
            yield f"{chosen} with {settings}: {reason}. Use {', or '.join(ways)}."


def learning_rate_decays_after_warmup(optim: Optimizer, train: Train) -> Problems:
    if optim.min_lr > optim.lr:
        tenth = optim.lr / 10
        yield f"optim.min_lr={optim.min_lr:g} is more than optim.lr={optim.lr:g}. Use optim.min_lr={tenth:g} or less."
    end = optim.decay_steps or train.steps
    if optim.decay != "constant" and optim.warmup > end:
        key = "optim.decay_steps" if optim.decay_steps else "train.steps"
        yield (
            f"optim.warmup={optim.warmup} is longer than {key}={end}, where the decay ends. "
            f"Use optim.warmup={end // 10}, or optim.decay_steps={optim.warmup * 10}."
        )


def params_are_as_wide_as_compute(precision: Precision) -> Problems:
    if 16 < BITS[precision.params] < BITS[precision.compute]:  # sums_are_wide_enough refuses 16
        yield (
            f"precision.params={precision.params} is narrower than precision.compute={precision.compute}. "
            f"Use precision.params={precision.compute}, or precision.compute={precision.params}."
        )


def float16_has_loss_scaling(precision: Precision) -> Problems:
    compute, scale = f"precision.compute={precision.compute}", f"precision.loss_scale={precision.loss_scale}"
    if precision.compute == "float16" and precision.loss_scale == "none":
        yield (
            f"{compute} with {scale}: gradients below 6e-8 would underflow to zero. "
            f"Use precision.loss_scale=dynamic, or precision.compute=bfloat16."
        )
    if precision.compute != "float16" and precision.loss_scale == "dynamic":
        yield (
            f"{scale} with {compute}: only float16 has so small a range that it needs loss scaling. "
            f"Use precision.loss_scale=none, or precision.compute=float16."
        )
    if precision.initial_scale < precision.min_scale:
        initial, least = (f"{value:.17g}" for value in (precision.initial_scale, precision.min_scale))
        yield (
            f"precision.initial_scale={initial} is less than precision.min_scale={least}. "
            f"Use precision.initial_scale={least}, or precision.min_scale={initial}."
        )


def sums_are_wide_enough(precision: Precision) -> Problems:
    if precision.reduce == "float16":
        yield (
            "precision.reduce=float16 is not supported: a sum of gradients can overflow where no single gradient "
            "does. Use precision.reduce=float32."
        )
    if BITS[precision.params] == 16:
        yield (
            f"precision.params={precision.params} is not supported: the optimizer's moments and accumulated gradients "
            "would be 16-bit. Use precision.params=float32."
        )


CHECKS: tuple[Callable[..., Problems], ...] = (
    heads_divide_width,
    rotary_heads_have_even_width,
    *layout_checks.CHECKS,
    *objective_checks.CHECKS,
    learning_rate_decays_after_warmup,
    params_are_as_wide_as_compute,
    float16_has_loss_scaling,
    kernel_supports_model,
    sums_are_wide_enough,
)


def problems(sections: Mapping[str, Section]) -> list[str]:
    """The problems that all checks find whose sections are present."""
    found: list[str] = []
    for check in CHECKS:
        needed = inspect.signature(check).parameters
        if needed.keys() <= sections.keys():
            found += check(**{name: sections[name] for name in needed})
    return found


def conflicting_keys(problem: str) -> list[tuple[str, str]]:
    """The (section, key) pairs in conflict: those in the first sentence of a problem."""
    return re.findall(r"\b([a-z]+)\.(\w+)=", problem.split(". ")[0])
