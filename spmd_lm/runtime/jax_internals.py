"""The private names of jax that this package uses, and why no public one would do.  Importing this imports jax."""

from typing import Any

from jax._src import compilation_cache as compilation_cache  # the public one takes only a directory, no cache
from jax._src import distributed
from jax._src.clusters import ClusterEnv
from jax.interpreters import mlir

global_state: Any = distributed.global_state
"""The process in its job: the coordinator's key-value store, which public jax has only for arrays on devices, and the
preemption service, which public jax starts when the process joins, or never."""

cluster_types: Any = ClusterEnv._cluster_types
"""Launchers and clouds, each with the index of this process, which public jax has only after it has joined."""

lowerings: Any = mlir._lowerings
"""Lowering rules by primitive; public jax only adds rules for new primitives."""

register_lowering, ir = mlir.register_lowering, mlir.ir
