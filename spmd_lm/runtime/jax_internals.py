"""The private names of jax that this package uses, and why no public one does.  Importing this imports jax."""

from typing import Any

from jax._src import compilation_cache as compilation_cache  # the public one takes a directory alone, no other cache
from jax._src import distributed
from jax._src.clusters import ClusterEnv
from jax.interpreters import mlir

global_state: Any = distributed.global_state
"""The process in its job: the coordinator's key-value store, which public jax has only for arrays on devices, and the
preemption service, which public jax starts when the process joins, or never."""

cluster_types: Any = ClusterEnv._cluster_types
"""Launchers and clouds, each with the number of this process, which public jax tells only after it has joined."""

lowerings: Any = mlir._lowerings
"""Lowering rules by primitive; public jax has rules for new primitives alone."""

register_lowering, ir = mlir.register_lowering, mlir.ir
