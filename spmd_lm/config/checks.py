"""What sections of a configuration must agree on.

A check is a generator of messages whose parameter names say which sections it needs, so that it can run as soon as
those are sound.  A message begins with the keys at odds, as section.key=value, and ends with the nearest settings that
would do."""

import inspect
import re
from collections.abc import Callable, Mapping

from spmd_lm.config import layout_checks, objective_checks
from spmd_lm.config.numbers import Messages, divisors, multiples, nearest
from spmd_lm.config.schema import AdamW, Model, Precision, Section, Train

BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}


def heads_divide_width(model: Model) -> Messages:
    if model.width % model.heads:
        yield (
            f"model.width={model.width} is not divisible by model.heads={model.heads}. "
            f"Use {nearest('model.heads', model.heads, divisors(model.width))}, "
            f"or {nearest('model.width', model.width, multiples(model.width, model.heads))}."
        )


def features_turn_in_pairs(model: Model) -> Messages:
    if model.positions == "rotary" and model.width % model.heads == 0 and model.head_width % 2:
        fits = [n for n in divisors(model.width) if model.width // n % 2 == 0]
        heads = f"{nearest('model.heads', model.heads, fits)}, or " if fits else ""
        yield (
            f"model.positions=rotary with model.width={model.width} and model.heads={model.heads}: heads are "
            f"{model.head_width} wide, and features turn in pairs. Use {heads}model.positions=learned."
        )


def schedule_descends(optim: AdamW, train: Train) -> Messages:
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


def parameters_hold_compute(precision: Precision) -> Messages:
    if 16 < BITS[precision.params] < BITS[precision.compute]:  # 16: not_in_this_version says so
        yield (
            f"precision.params={precision.params} is narrower than precision.compute={precision.compute}. "
            f"Use precision.params={precision.compute}, or precision.compute={precision.params}."
        )


def float16_is_scaled(precision: Precision) -> Messages:
    compute, scale = f"precision.compute={precision.compute}", f"precision.loss_scale={precision.loss_scale}"
    if (precision.compute == "float16") > (precision.loss_scale == "dynamic"):
        yield (
            f"{compute} with {scale}: gradients below 6e-8 would be zero. "
            f"Use precision.loss_scale=dynamic, or precision.compute=bfloat16."
        )
    if (precision.compute == "float16") < (precision.loss_scale == "dynamic"):
        yield (
            f"{scale} with {compute}: only float16 has a range so small. "
            f"Use precision.loss_scale=none, or precision.compute=float16."
        )
    if precision.initial_scale < precision.min_scale:
        first, least = (f"{value:.17g}" for value in (precision.initial_scale, precision.min_scale))
        yield (
            f"precision.initial_scale={first} is less than precision.min_scale={least}. "
            f"Use precision.initial_scale={least}, or precision.min_scale={first}."
        )


def kernel_has_dropout(model: Model) -> Messages:
    if model.attention in ("cudnn", "splash") and model.attention_dropout:
        yield (
            f"model.attention={model.attention} with model.attention_dropout={model.attention_dropout}: "
            "these kernels have no such dropout. Use model.attention=xla, or model.attention_dropout=0."
        )


def kernel_takes_shapes(model: Model, precision: Precision) -> Messages:
    """What an explicit choice would meet as a traceback; `auto` chooses by what is there."""
    asked, otherwise = f"model.attention={model.attention}", "model.attention=xla"
    if model.attention == "cudnn" and BITS[precision.compute] != 16:
        yield (
            f"{asked} with precision.compute={precision.compute}: cuDNN takes 16-bit types. "
            f"Use precision.compute=bfloat16, or {otherwise}."
        )
    fits = [n for n in divisors(model.width) if _cudnn_takes(model.width // n)]
    if model.attention == "cudnn" and model.width % model.heads == 0 and not _cudnn_takes(model.head_width):
        heads = f"{nearest('model.heads', model.heads, fits)}, or " if fits else ""
        yield (
            f"{asked} with model.width={model.width} and model.heads={model.heads}: heads are {model.head_width} wide, "
            f"and cuDNN takes multiples of 8 up to 128. Use {heads}{otherwise}."
        )
    if model.attention == "splash" and model.context % 128:
        contexts = nearest("model.context", model.context, multiples(model.context, 128))
        yield (
            f"{asked} with model.context={model.context}: splash takes multiples of 128 positions. "
            f"Use {contexts}, or {otherwise}."
        )


def _cudnn_takes(head_width: int) -> bool:
    return head_width % 8 == 0 and head_width <= 128  # from Hopper on 256, but a configuration knows no device


def not_in_this_version(precision: Precision) -> Messages:
    """Refused, since a key that is read and then ignored would be a lie."""
    if precision.reduce == "float16":
        yield (
            "precision.reduce=float16 is not in this version: a sum of gradients would overflow where none of them "
            "does. Use precision.reduce=float32."
        )
    if BITS[precision.params] == 16:
        yield (
            f"precision.params={precision.params} is not in this version: moments and accumulated gradients would be "
            "16-bit. Use precision.params=float32."
        )


CHECKS: tuple[Callable[..., Messages], ...] = (
    heads_divide_width,
    features_turn_in_pairs,
    *layout_checks.CHECKS,
    *objective_checks.CHECKS,
    schedule_descends,
    parameters_hold_compute,
    float16_is_scaled,
    kernel_has_dropout,
    kernel_takes_shapes,
    not_in_this_version,
)


def problems(sections: Mapping[str, Section]) -> list[str]:
    """The messages of every check whose sections are all there."""
    found: list[str] = []
    for check in CHECKS:
        needs = inspect.signature(check).parameters
        if needs.keys() <= sections.keys():
            found += check(**{name: sections[name] for name in needs})
    return found


def subjects(message: str) -> list[tuple[str, str]]:
    """The (section, key) pairs at odds: those of a message's first sentence."""
    return re.findall(r"\b([a-z]+)\.(\w+)=", message.split(". ")[0])
