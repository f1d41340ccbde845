"""Storage of a checkpoint's arrays: orbax for all processes of a job together, or a file per process, on its own
host."""

import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from orbax.checkpoint import v1 as ocp
from safetensors import safe_open
from safetensors.numpy import save_file

from spmd_lm.checkpoints.parts import parts_of
from spmd_lm.parallel.array_parts import ShardReader, bounds_of, part_key
from spmd_lm.parallel.host_memory import PINNED
from spmd_lm.parallel.trees import Tree, leaves_by_path

Fields = dict[str, Tree]  # of a state

SHARDS_FILE = "shards.safetensors"


class Response(Protocol):
    def result(self, timeout: float | None = None) -> Any:
        """Waits.  Raises TimeoutError, or the error that made the save fail."""


class Storage(Protocol):
    shared: bool  # all processes write one directory, managed by the first; otherwise, each has its own

    def save(self, path: Path, fields: Fields) -> Response:
        """Starts writing the arrays to a directory, which is emptied first."""

    def load(self, path: Path, abstract_fields: Fields) -> Fields:
        """Reads these arrays, in these shardings."""


class OrbaxStorage:
    shared = True

    def save(self, path: Path, fields: Fields) -> Response:
        context = ocp.Context()
        if any(leaf.sharding.memory_kind == PINNED for leaf in jax.tree.leaves(fields)):
            context.array.saving.use_replica_parallel = False  # it would slice them with a program of the devices
        with context:
            return ocp.save_checkpointables_async(path, {"state": fields}, overwrite=True)

    def load(self, path: Path, abstract_fields: Fields) -> Fields:
        """Reads in each process independently, so that one that fails does not block the others.  Empty nested dicts
        are left out: orbax would compare them, and report a difference as damage."""
        nested = unflatten_dict(leaves_by_path(abstract_fields), sep=".")
        context, process = ocp.Context(), jax.process_index()
        context.multiprocessing.primary_host = process
        context.multiprocessing.active_processes = {process}
        context.pytree.loading.partial_load = True
        with context:
            loaded = leaves_by_path(ocp.load_checkpointables(path, {"state": nested})["state"])
        arrays = [loaded[name] for name in leaves_by_path(abstract_fields)]
        return jax.tree.unflatten(jax.tree.structure(abstract_fields), arrays)


class ShardStorage:
    """The local shards of the arrays, each once, in a safetensors file, as bytes because safetensors lacks some of
    jax's dtypes.  For another layout, arrays are assembled from the available parts."""

    shared = False

    def __init__(self, all_parts: bool = False):
        self._all_parts = all_parts  # read parts of other processes too, if on this host

    def save(self, path: Path, fields: Fields) -> Response:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, mode=0o700)  # every user can look into the directories of a host's memory
        parts: dict[str, np.ndarray] = {}
        for name, leaf in leaves_by_path(fields).items():
            for shard in leaf.addressable_shards:
                key = part_key(name, bounds_of(shard.index, leaf.shape))
                if key not in parts:  # copied, because the next step reuses the buffer
                    parts[key] = np.array(shard.data, copy=True).reshape(-1).view(np.uint8)
        writer = ThreadPoolExecutor(1, "checkpoint")
        response = writer.submit(save_file, parts, path / SHARDS_FILE)
        writer.shutdown(wait=False)
        return response

    def load(self, path: Path, abstract_fields: Fields) -> Fields:
        with ExitStack() as opened:
            paths = parts_of(path) if self._all_parts else [path]
            files = [opened.enter_context(safe_open(each / SHARDS_FILE, framework="numpy")) for each in paths]
            reader = ShardReader(files)
            arrays = [
                jax.make_array_from_callback(leaf.shape, leaf.sharding, functools.partial(reader.read, name, leaf))
                for name, leaf in leaves_by_path(abstract_fields).items()
            ]
            jax.block_until_ready(arrays)
        return jax.tree.unflatten(jax.tree.structure(abstract_fields), arrays)
