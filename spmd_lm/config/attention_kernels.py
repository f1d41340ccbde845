"""The attention kernels: what each one supports, and which one a run uses.

Configuration checks and the choice for a platform read the same limits.  `auto` takes cuDNN on GPU and splash on TPU
where they support the model, elsewhere the chunked kernel, which supports all and holds no row's scores; short rows on
a CPU take the dense one, `xla`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from spmd_lm.config.context_parallel import ring_chunks
from spmd_lm.config.data_sections import packs_documents
from spmd_lm.config.schema import Model, RunConfig
from spmd_lm.config.suggest import Obstacle, divisors, nearest, nearest_multiple
from spmd_lm.config.types import Dtype
from spmd_lm.errors import ConfigError


@dataclass(frozen=True)
class FusedKernel:
    """The limits of a fused kernel.  None has dropout: its mask would differ between layouts."""

    name: str
    platform: str
    dtypes: tuple[str, ...] = get_args(Dtype)  # for queries, keys and values
    not_on: tuple[str, ...] = ()  # lower-case prefixes of jax's device_kind, for devices too old for it
    head_multiple: int = 1
    max_head_width: int | None = None
    context_multiple: int = 1
    packs_causal: bool = True  # causal rows may hold several documents
    rings_of_padding: bool = True  # around a ring, rows that are not causal may end in padding
    two_way_windows: bool = True  # windows without a causal mask
    soft_caps: bool = True
    deterministic: bool = True  # runs under run.deterministic

    def supports_head_width(self, width: int) -> bool:
        return width % self.head_multiple == 0 and (self.max_head_width is None or width <= self.max_head_width)


FUSED_KERNELS = {
    # From Hopper on, cuDNN supports heads up to 256 wide; but a configuration does not know its device.
    "cudnn": FusedKernel(
        "cuDNN",
        "gpu",
        ("bfloat16", "float16"),
        # GPUs before Ampere.
        ("tesla", "quadro", "titan", "nvidia titan", "nvidia geforce gtx", "nvidia geforce rtx 20"),
        8,
        128,
        packs_causal=False,
        rings_of_padding=False,  # a device without any token would have no key
        two_way_windows=False,
        soft_caps=False,
        deterministic=False,
    ),
    "splash": FusedKernel("splash", "tpu", context_multiple=128),
}


def obstacles(
    kernel: FusedKernel,
    model: Model,
    compute: str,
    *,
    packs: bool = False,
    chunks: int = 1,
    deterministic: bool = False,
) -> Iterator[Obstacle]:
    """Obstacles to running this model, with one kind of layer, in dtype `compute`.

    packs: rows hold several documents.
    chunks: of a row, that the kernel gets at a time around a ring.
    deterministic: run.deterministic."""
    if deterministic and not kernel.deterministic:
        # On one H200, in 4 of 4 runs, the step raised IndexError (absl raw_hash_map::at).
        reason = (
            f"{kernel.name}'s attention ends in its first step where XLA's operations are deterministic (jax 0.11.2)"
        )
        yield Obstacle("run.deterministic=true", reason, "run.deterministic=false")
    if model.attention_dropout:
        reason = "fused kernels have no dropout that is the same under every layout"
        yield Obstacle(f"{model.attention_dropout=}", reason, "model.attention_dropout=0")
    if compute not in kernel.dtypes:
        reason = f"{kernel.name} takes {' or '.join(kernel.dtypes)}"
        yield Obstacle(f"precision.compute={compute}", reason, f"precision.compute={kernel.dtypes[0]}")
    if model.attention_softcap and not kernel.soft_caps:
        reason = f"{kernel.name} has no soft caps"
        yield Obstacle(f"{model.attention_softcap=}", reason, "model.attention=chunked")
    if (model.head_width or model.width % model.heads == 0) and not kernel.supports_head_width(model.head_dim):
        supported = f"multiples of {kernel.head_multiple} up to {kernel.max_head_width}"
        reason = f"heads are {model.head_dim} wide, and {kernel.name} takes {supported}"
        heads = [n for n in divisors(model.width) if kernel.supports_head_width(model.width // n)]
        if model.head_width:
            yield Obstacle(f"{model.head_width=}", reason, "model.attention=chunked")
        else:
            yield Obstacle(f"{model.width=} and {model.heads=}", reason, nearest(f"{model.heads=}", heads))
    if packs and model.causal and not kernel.packs_causal:
        yield Obstacle("data.pack=true", f"{kernel.name} has no causal mask of documents", "data.pack=false")
    if model.span and not model.causal and not kernel.two_way_windows:
        yield Obstacle(f"span={model.span} of model.period", f"{kernel.name}'s windows are causal", "model.kind=gpt")
    if chunks > 1 and not model.causal and not kernel.rings_of_padding:
        reason = f"{kernel.name} needs a key for each call, and those of a device may all be padding"
        yield Obstacle(f"a ring over {chunks} devices", reason, "model.attention=chunked")
    if model.context % (multiple := kernel.context_multiple * chunks):
        reason = f"{kernel.name} takes multiples of {kernel.context_multiple} positions"
        reason += f", and around this ring gets 1/{chunks} of a row" if chunks > 1 else ""
        yield Obstacle(f"{model.context=}", reason, nearest_multiple(f"{model.context=}", multiple))


DENSE_ON_CPU = 512
"""Tokens of a row up to which a CPU takes the dense kernel.  Of its time the chunked one takes 1.15 there, at 1,024
tokens 0.82, and at 4,096 0.60 (`python benchmarks/attention.py`, causal)."""


def attention_block(platform: str) -> int:
    """Queries, and keys, of a block of the chunked kernel at most.  In blocks of 128 scores stay in a CPU's cache."""
    return 128 if platform == "cpu" else 512


class KernelChoice(NamedTuple):
    kernel: str
    why: str


def choose_kernel(config: RunConfig, platform: str, device_kind: str = "") -> KernelChoice:
    """The kernel for `model.attention` on `platform`, and why, in a run with one kind of layer.  Raises ConfigError for
    an explicit kernel that cannot run there.
    device_kind: jax's; an unknown one counts as new."""
    asked, chunks = config.model.attention, ring_chunks(config.model, config.parallel)
    name: str = asked
    if asked == "auto":
        name = next((name for name, kernel in FUSED_KERNELS.items() if kernel.platform == platform), "")
    if name not in FUSED_KERNELS:
        if asked != "auto":
            return KernelChoice(asked, "as configured")
        if platform == "cpu" and chunks == 1 and config.model.context <= DENSE_ON_CPU:
            return KernelChoice("xla", f"rows of at most {DENSE_ON_CPU} tokens on a CPU")
        return KernelChoice("chunked", f"no fused kernel for {platform}")
    kernel = FUSED_KERNELS[name]
    packs, deterministic = packs_documents(config.data), config.run.deterministic
    options: dict[str, Any] = {"packs": packs, "chunks": chunks, "deterministic": deterministic}
    found = obstacles(kernel, config.model, config.precision.compute, **options)
    problems = [f"{o.settings}: {o.reason}" for o in found]
    if device_kind.lower().startswith(kernel.not_on):
        problems.insert(0, f"{kernel.name}'s attention does not run on a {device_kind}")
    if asked == "auto":
        return KernelChoice("chunked", problems[0]) if problems else KernelChoice(name, f"fused kernel for {platform}")
    if kernel.platform != platform:
        problems.insert(0, f"{kernel.name} does not run on {platform}")
    if problems:
        raise ConfigError(f"model.attention={asked}: {'; '.join(problems)}. Use model.attention=auto or chunked.")
    return KernelChoice(asked, "as configured")
