"""SPMD training of GPTs on a JAX device mesh.  Start at docs/tour.md."""

__version__ = "0.1.0"
