"""The resolution of `parallel.context_attention`: how devices with different tokens of a row attend to one another's.

`heads` takes any kernel, but needs a query head for each device; `ring` needs none."""

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # schema.py resolves it for each kind of layer
    from spmd_lm.config.schema import Model, Parallel


class ContextChoice(NamedTuple):
    form: Literal["heads", "ring"]
    why: str

    def is_zigzag(self, model: "Model") -> bool:
        """True if a device has two chunks of a row, one from each end, so that causal work is balanced."""
        return self.form == "ring" and model.causal


def choose_context_attention(model: "Model", parallel: "Parallel") -> ContextChoice:
    """The form of attention over `context`, the same in all layers, and the reason."""
    if (asked := parallel.context_attention) != "auto":
        return ContextChoice(asked, "as configured")
    for each in model.of_each_kind:
        if too_few := too_few_heads(each, parallel):
            return ContextChoice("ring", too_few)
    return ContextChoice("heads", "each device gets whole heads")


def with_form(model: "Model", parallel: "Parallel") -> "Parallel":
    """`parallel` with the form of attention, for a model of one of its kinds of layers alone."""
    return parallel.model_copy(update={"context_attention": choose_context_attention(model, parallel).form})


def ring_chunks(model: "Model", parallel: "Parallel") -> int:
    """Chunks of a row that a kernel gets at a time around a ring; 1 without one: it gets whole rows."""
    chosen = choose_context_attention(model, parallel)
    if parallel.context == 1 or chosen.form != "ring":
        return 1
    return parallel.context * (2 if chosen.is_zigzag(model) else 1)


def too_few_heads(model: "Model", parallel: "Parallel") -> str:
    """Why devices along `context` cannot have as many query heads each, in a layer of a model of one kind; or ''."""
    of_device = f"{model.heads=}" + f" over {parallel.model=}" * (parallel.model > 1)
    too_few = model.heads // parallel.model % parallel.context
    return f"{of_device} is not divisible by {parallel.context=}" if too_few else ""
