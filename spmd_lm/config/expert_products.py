"""The products of experts' matrices: in buffers of fixed sizes, or a library's grouped products, of tokens sorted by
expert.

Buffers run everywhere.  Without a capacity they have room for each token in each expert; a grouped product has the rows
that there are, and a library has one with gradients on TPUs alone."""

from typing import NamedTuple

from spmd_lm.config.schema import RunConfig

BUFFERS = "buffers"


class ProductLimits(NamedTuple):
    """The limits of a grouped product."""

    platform: str
    dtypes: tuple[str, ...]


GROUPED_PRODUCTS = {"megablox": ProductLimits("tpu", ("bfloat16", "float32"))}


class ProductChoice(NamedTuple):
    product: str  # BUFFERS, or a key of GROUPED_PRODUCTS
    why: str


def choose_product(config: RunConfig, platform: str) -> ProductChoice:
    """The formulation for the mixture of a run with one kind of layer, on `platform`, and why."""
    moe, compute = config.model.moe, config.precision.compute
    if moe is None:
        return ProductChoice(BUFFERS, "no experts")
    if moe.capacity != "none":
        return ProductChoice(BUFFERS, "a capacity bounds them")
    if config.parallel.expert > 1:
        return ProductChoice(BUFFERS, f"what parallel.expert={config.parallel.expert} sends has a fixed size")
    name = next((name for name, each in GROUPED_PRODUCTS.items() if each.platform == platform), None)
    if name is None:
        return ProductChoice(BUFFERS, f"no grouped product for {platform}")
    if compute not in (dtypes := GROUPED_PRODUCTS[name].dtypes):
        return ProductChoice(BUFFERS, f"{name} takes {' or '.join(dtypes)}, not precision.compute={compute}")
    return ProductChoice(name, f"grouped product for {platform}")
