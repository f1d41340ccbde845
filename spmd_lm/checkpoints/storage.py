"""Storage of a checkpoint's arrays: orbax for all processes of a job together; or parts in files of each process, on
its own host, or where all see them."""

import functools
import itertools
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from orbax.checkpoint import v1 as ocp
from safetensors import safe_open

from spmd_lm.checkpoints.parts import parts_of
from spmd_lm.files import create
from spmd_lm.parallel.array_parts import ShardReader, bounds_of, header_of_parts, part_key
from spmd_lm.parallel.fingerprint import StoredLeaf
from spmd_lm.parallel.host_memory import PINNED
from spmd_lm.parallel.trees import Tree, leaves_by_path
from spmd_lm.runtime.processes import allgather_objects

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
    """The local shards of the arrays, each once, in a safetensors file, and links to the files of those that rest in
    files.  For another layout, arrays are assembled from the available parts.

    all_parts: read parts of other processes too, if on this host.
    shared: all processes write one directory.
    log: prints messages for the user."""

    def __init__(self, all_parts: bool = False, shared: bool = False, log: Callable[[str], None] = lambda line: None):
        self._all_parts, self.shared, self._log = all_parts, shared, log
        self._copies = False  # the file system refused a link

    def save(self, path: Path, fields: Fields) -> Response:
        if not self.shared or jax.process_index() == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True, mode=0o777 if self.shared else 0o700)  # others can look into a host's memory
        if self.shared:
            allgather_objects(f"emptied {path.name}", None)
        parts, files = dict[str, np.ndarray](), dict[Path, None]()
        for name, leaf in leaves_by_path(fields).items():
            if isinstance(leaf, StoredLeaf):
                files |= dict.fromkeys(leaf.files)
                continue
            for shard in leaf.addressable_shards:
                key = part_key(name, bounds_of(shard.index, leaf.shape))
                if key not in parts:  # copied, because the next step reuses the buffer
                    parts[key] = np.array(shard.data, copy=True).reshape(-1).view(np.uint8)
        targets = ((file, path / f"group-{jax.process_index()}-{file.name}") for file in files)
        refused = [opened for opened in itertools.starmap(self._link, targets) if opened]
        writer = ThreadPoolExecutor(1, "checkpoint")
        response = writer.submit(self._write, path, parts, refused)
        writer.shutdown(wait=False)
        return response

    def _link(self, file: Path, target: Path) -> tuple[BinaryIO, Path] | None:
        """Links the file or, where that is refused, opens it, to be copied even if it is removed meanwhile."""
        try:
            os.link(file, target)
        except OSError as error:
            if not self._copies:
                self._log(f"{target.parent}: no links to {file.parent} ({error.strerror}): its files are copied.")
            self._copies = True
            return open(file, "rb"), target
        return None

    def _write(self, path: Path, parts: dict[str, np.ndarray], refused: list[tuple[BinaryIO, Path]]) -> None:
        for file, target in refused:
            with file, create(target) as copy:
                shutil.copyfileobj(file, copy, 2**24)
                copy.flush()
                os.fsync(copy.fileno())
        process, processes = jax.process_index(), jax.process_count()
        name = f"shards-{process}-of-{processes}.safetensors" if self.shared else SHARDS_FILE
        partial = path / f"{name}.tmp"
        with create(partial) as file:
            file.write(header_of_parts({key: part.nbytes for key, part in parts.items()}))
            for part in parts.values():
                file.write(part.data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path / name)
        while self.shared and process == 0 and len([*path.glob(f"shards-*-of-{processes}.safetensors")]) < processes:
            time.sleep(0.1)  # other processes write theirs last, too

    def load(self, path: Path, abstract_fields: Fields) -> Fields:
        with ExitStack() as opened:
            paths = parts_of(path) if self._all_parts else [path]
            found = [file for each in paths for file in sorted(each.glob("*.safetensors"))]
            reader = ShardReader([opened.enter_context(safe_open(file, framework="numpy")) for file in found])
            arrays = [
                jax.make_array_from_callback(leaf.shape, leaf.sharding, functools.partial(reader.read, name, leaf))
                for name, leaf in leaves_by_path(abstract_fields).items()
            ]
            jax.block_until_ready(arrays)
        return jax.tree.unflatten(jax.tree.structure(abstract_fields), arrays)


def holds_parts(path: Path) -> bool:
    """True for a checkpoint that a ShardStorage wrote."""
    return any(path.glob("*.safetensors"))
