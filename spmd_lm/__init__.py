"""SPMD training of GPT, BERT and Llama on a JAX device mesh."""

__version__ = "0.1.0"

__all__ = [
    "ModelModules",
    "Program",
    "audit",
    "axis_rules",
    "evaluate",
    "fill_mask",
    "generate",
    "load_config",
    "make_model",
    "param_shardings",
    "plan",
    "preflight",
    "read_batch",
    "report",
    "search_layouts",
    "train",
]


def __getattr__(name: str):
    """Imports public functions (api.py) on first use: `import spmd_lm` alone costs nothing, and loads no jax."""
    if name not in __all__:
        raise AttributeError(f"module 'spmd_lm' has no attribute '{name}'")
    from spmd_lm import api

    return getattr(api, name)
