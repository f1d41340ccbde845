"""Stores of groups of offloaded state between steps: in memory, or in files (ZeRO-Infinity, arXiv:2104.07857).

Files are scratch: whoever starts, or resumes from a checkpoint, begins with an empty directory.  None is ever changed.
Those of step N + 1 are written beside those of step N, which are removed once all of step N + 1 are on disk."""

import dataclasses
import functools
import math
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from spmd_lm.errors import ConfigError, OffloadError
from spmd_lm.files import create
from spmd_lm.parallel.array_parts import Bounds, header_of_parts, part_key, sizes_of
from spmd_lm.parallel.fingerprint import StoredLeaf, Sums, sums_of_part
from spmd_lm.parallel.groups import Group
from spmd_lm.parallel.host_memory import PINNED
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.runtime.directories import is_locked, lock_directory
from spmd_lm.runtime.formatting import format_bytes, parse_count
from spmd_lm.runtime.outputs import print_line, writing
from spmd_lm.runtime.processes import allgather_objects
from spmd_lm.step.local_shards import LocalShards, Trees

StoredArrays = list[tuple[str, dict[str, np.dtype]]]
"""For each of `Trees` its name in the canonical state, as in 'opt_state.mu', and the dtypes of its arrays, by path."""


class Store(Protocol):
    """Holds each group's state between steps.  `local`: a form of the place that updates it."""

    def begin(self, step: Any, *, anew: bool = False) -> None:
        """Prepares for the groups of `step`, which are put next.  anew: forgets all others first."""

    def put(self, group: Group, local: Any) -> Any:
        """The state, at rest."""

    def read_ahead(self, *states: Any) -> None:
        """Begins to fetch states."""

    def fetch(self, state: Any) -> Any:
        """Returns `local`, from the state."""

    def commit(self) -> None:
        """Ends a step, all of whose groups were put."""

    def flush(self) -> None:
        """Waits until the last step that was committed is at rest."""

    def close(self) -> None:
        """Forgets everything."""


class InMemory:
    """A store in memory.  rest, fetch: between `local` and the state."""

    def __init__(self, rest: Callable[[Any], Any], fetch: Callable[[Any], Any]):
        self._rest, self._fetch = rest, fetch

    def begin(self, step: Any, *, anew: bool = False) -> None: ...

    def put(self, group: Group, local: Any) -> Any:
        return self._rest(local)

    def read_ahead(self, *states: Any) -> None: ...

    def fetch(self, state: Any) -> Any:
        return self._fetch(state)

    def commit(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Part(NamedTuple):
    """A part of a canonical array in a group's file.
    tree, path, number: it is of the n-th distinct shard of this array of this tree.
    within: its place in that shard.
    name, bounds: in the canonical state."""

    tree: int
    path: str
    number: int
    within: tuple[slice, ...]
    name: str
    bounds: Bounds
    size: int


class Layout(NamedTuple):
    """The contents of a group's file.  shapes: of the shards, by (tree, path, number)."""

    header: bytes
    parts: tuple[Part, ...]
    shapes: dict[tuple[int, str, int], tuple[tuple[int, ...], np.dtype]]

    @property
    def size(self) -> int:
        return len(self.header) + sum(part.size for part in self.parts)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredGroup:
    """A group's state in a file.  written: the sums of its parts, once it is on disk."""

    path: Path
    group: Group
    written: "Future[tuple[Sums, ...]]"


class InFiles:
    """A file for each group, in the format of checkpoints, in canonical coordinates: STEP/NUMBER.safetensors.

    One thread writes and one reads, so that three groups are in memory: the last, this one and the next.

    directory: this process's own, emptied at each start.
    groups: all there are.
    split, join: between `local` and shards, see LocalShards."""

    def __init__(
        self,
        directory: Path,
        groups: Sequence[Group],
        arrays: StoredArrays,
        shards: LocalShards,
        split: Callable[[Group, Any], list[Trees]],
        join: Callable[[Group, list[Trees]], Any],
    ):
        self.directory, self._groups, self._arrays, self._shards = directory, groups, arrays, shards
        self._split, self._join = split, join
        self._opened: ExitStack | None = None
        self._step, self._writes = 0, list[Future]()
        self._committed: Future[None] | None = None
        self._ahead: dict[StoredGroup, Future] = {}

    # ---- a file's contents

    @functools.cached_property
    def layouts(self) -> dict[Group, Layout]:
        return {group: self._layout(group) for group in self._groups}

    def _layout(self, group: Group) -> Layout:
        parts, shapes = list[Part](), {}
        for tree, (prefix, dtypes) in enumerate(self._arrays):
            for path in (".".join(keys) for keys in group.paths if dtypes):
                dtype = dtypes[path]
                for number, bounds in enumerate(self._shards.distinct(path, group)):
                    shapes[tree, path, number] = tuple(sizes_of(bounds)), dtype
                    for within, canonical in self._shards.canonical_parts(path, group, bounds):
                        size = math.prod(sizes_of(canonical)) * dtype.itemsize
                        parts.append(Part(tree, path, number, within, f"{prefix}.{path}", canonical, size))
        header = header_of_parts({part_key(part.name, part.bounds): part.size for part in parts})
        return Layout(header, tuple(parts), shapes)

    # ---- the directory

    def _open(self) -> None:
        if self._opened:
            return
        with ExitStack() as stack:
            warn = functools.partial(print_line, stream=sys.stderr)
            stack.enter_context(lock_directory(self.directory, warn, True, "optim.offload_dir"))
            stack.callback(self._empty_at_the_end)
            self._writer = stack.enter_context(ThreadPoolExecutor(1, "offload-write"))
            self._reader = stack.enter_context(ThreadPoolExecutor(1, "offload-read"))
            with writing(self.directory):
                self._remove_abandoned()
                self._empty()
            self._require_room()
            self._opened = stack.pop_all()

    def _remove_abandoned(self) -> None:
        """Removes what an earlier job of more processes left behind."""
        for path in self.directory.parent.glob("process-*"):
            number, count = parse_count(path.name.removeprefix("process-")), jax.process_count()
            ours = number is not None and number >= count and number % count == jax.process_index()
            if ours and not is_locked(path):
                shutil.rmtree(path)

    def _require_room(self) -> None:
        """Raises ConfigError if there is no room for two copies of the state of this host's processes."""
        own = socket.gethostname(), 2 * sum(layout.size for layout in self.layouts.values())
        needed = sum(size for host, size in allgather_objects("optim.offload_dir", own) if host == own[0])
        problem = ""
        if (free := shutil.disk_usage(self.directory).free) < needed:
            problem = (
                f"optim.offload_dir={self.directory.parent}: two copies of masters and moments take "
                f"{format_bytes(needed)} there, and {format_bytes(free)} are free. Make room, choose another "
                "optim.offload_dir, or use optim.offload=host."
            )
        if problem := next(filter(None, allgather_objects("room in optim.offload_dir", problem)), ""):
            raise ConfigError(problem)  # in all processes, before any of them writes

    def _empty(self, but: str = "") -> None:
        """Removes the files of all steps, or of all but one."""
        for path in self.directory.iterdir():
            if path.name.isdecimal() and path.name != but:
                shutil.rmtree(path)

    def _empty_at_the_end(self) -> None:
        with suppress(OSError):  # moved, perhaps
            self._empty()

    def close(self) -> None:
        self._ahead.clear()
        self._committed = None
        if self._opened:
            self._opened.close()
            self._opened = None

    # ---- a step

    def begin(self, step: Any, *, anew: bool = False) -> None:
        self._open()
        if anew:
            self._wait()
            with writing(self.directory):
                self._empty()
        else:
            self.flush()
        self._step, self._writes = int(step), []
        path = self._path_of(self._step)
        with writing(path):
            path.mkdir()

    def _wait(self) -> None:
        """Waits for the threads, whatever becomes of their work."""
        self._ahead.clear()
        for thread in (self._writer, self._reader):
            thread.submit(lambda: None).result()

    def _path_of(self, step: int) -> Path:
        return self.directory / str(step)

    def put(self, group: Group, local: Any) -> StoredGroup:
        """Waits for the write of the group before this one."""
        for write in self._writes[-1:]:
            write.result()
        path = self._path_of(self._step) / f"{self._groups.index(group):04d}.safetensors"
        self._writes.append(self._writer.submit(self._write, path, group, self._split(group, local)))
        return StoredGroup(path, group, self._writes[-1])

    def _write(self, path: Path, group: Group, shards: list[Trees]) -> tuple[Sums, ...]:
        layout, sums, leaves = self.layouts[group], list[Sums](), _leaves(shards)
        with writing(path, layout.size), create(path) as file:
            file.write(layout.header)
            for part in layout.parts:
                x = np.ascontiguousarray(np.asarray(leaves[part.tree, part.path, part.number])[part.within])
                sums.append(sums_of_part(x, part.bounds, self._shards.canonical_shape(part.path)))
                file.write(x.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        return tuple(sums)

    def commit(self) -> None:
        """Removes the files of the step before, in the background, once all of this one's are on disk."""
        self._committed = self._writer.submit(self._commit, self._step, self._writes)

    def flush(self) -> None:
        if self._committed:
            self._committed.result()

    def _commit(self, step: int, writes: list[Future]) -> None:
        for write in writes:
            write.result()
        with writing(self.directory):
            self._empty(but=str(step))

    # ---- for a checkpoint

    def leaves(self, states: Sequence[StoredGroup], like: Trees) -> Trees:
        """A StoredLeaf for each canonical array, and {} for masters that are not kept.  like: shapes, dtypes and
        shardings of canonical arrays."""
        self.flush()
        found: dict[tuple[int, str], tuple[dict[Bounds, Sums], dict[Path, None]]] = {}
        for state in states:
            for part, sums in zip(self.layouts[state.group].parts, state.written.result(), strict=True):
                parts, files = found.setdefault((part.tree, part.path), ({}, {}))
                parts[part.bounds], files[state.path] = sums, None

        def leaf(tree: int, path: str, x: jax.ShapeDtypeStruct) -> StoredLeaf:
            parts, files = found.get((tree, path), ({}, {}))  # {} if all that this process holds is padding
            sharding = x.sharding.with_memory_kind(PINNED)
            return StoredLeaf(x.shape, np.dtype(x.dtype), sharding, parts, tuple(files))

        return tuple(
            unflatten_dict({p: leaf(number, p, x) for p, x in leaves_by_path(tree).items() if dtypes}, sep=".")
            for number, (tree, (_, dtypes)) in enumerate(zip(like, self._arrays, strict=True))
        )

    # ---- reading back

    def read_ahead(self, *states: StoredGroup) -> None:
        for state in states:
            if state not in self._ahead:
                self._ahead[state] = self._reader.submit(self._read, state)

    def fetch(self, state: StoredGroup) -> Any:
        self.read_ahead(state)
        return self._join(state.group, self._ahead.pop(state).result())

    def _read(self, state: StoredGroup) -> list[Trees]:
        """Raises OffloadError if the file has other bits than were written."""
        written, layout = state.written.result(), self.layouts[state.group]
        leaves = {key: np.zeros(shape, dtype) for key, (shape, dtype) in layout.shapes.items()}
        try:
            with open(state.path, "rb") as file:
                intact = file.read(len(layout.header)) == layout.header
                for part, sums in zip(layout.parts, written, strict=True):
                    x = leaves[part.tree, part.path, part.number][part.within]
                    read = x if x.flags.c_contiguous else np.empty(x.shape, x.dtype)
                    intact &= file.readinto(read.reshape(-1).view(np.uint8).data) == read.nbytes
                    intact &= sums_of_part(read, part.bounds, self._shards.canonical_shape(part.path)) == sums
                    if read is not x:
                        x[...] = read
        except OSError as error:
            raise OffloadError(self._describe(state, f"cannot be read: {error.strerror}")) from error
        if not intact:
            raise OffloadError(self._describe(state, "not the bits that were written"))
        return self._trees(leaves)

    def _describe(self, state: StoredGroup, what: str) -> str:
        paths = ", ".join(".".join(keys) for keys in state.group.paths[:3])
        return (
            f"{state.path}: {what}: masters and moments of {paths}{', ..' * (len(state.group.paths) > 3)}. Start the "
            "run again: it resumes from its last checkpoint."
        )

    def _trees(self, leaves: dict[tuple[int, str, int], np.ndarray]) -> list[Trees]:
        numbers = range(1 + max(number for _, _, number in leaves))
        return [
            tuple(
                unflatten_dict({p: x for (t, p, n), x in leaves.items() if (t, n) == (tree, number)}, sep=".")
                for tree in range(len(self._arrays))
            )
            for number in numbers
        ]


def _leaves(shards: list[Trees]) -> dict[tuple[int, str, int], Any]:
    def each() -> Iterator[tuple[tuple[int, str, int], jax.Array]]:
        for number, trees in enumerate(shards):
            for tree, leaves in enumerate(trees):
                for path, x in leaves_by_path(leaves).items():
                    yield (tree, path, number), x

    return dict(each())
