"""Checkpoints: the canonical state after a step and what is needed to resume from it, written atomically by orbax.

Disk is the source of truth: a step exists once orbax has committed it, whatever else is in the directory.  Orbax
reports a failed background save only to a caller that waits for it, so every save waits for the one before; it casts
silently on restore, so shapes and dtypes are compared before any array is read."""

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from orbax.checkpoint import v1 as ocp

import spmd_lm
from spmd_lm.errors import CheckpointError
from spmd_lm.parallel.trees import Tree

Config = dict[str, Any]  # a RunConfig as JSON
Shapes = dict[str, jax.ShapeDtypeStruct]  # by path, as in 'blocks.attention.query'
Meta = dict[str, Any]  # JSON: config, data, versions

# Orbax writes this file last: before the rename, or instead of it on a file system without renames.
COMMITTED = "commit_success.txt"

OPTIONAL_FIELDS = ("loss_scale",)  # fields of a state that a run may gain or lose between restarts


def leaves_by_path(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree of dicts and dataclasses by path, as in 'blocks.attention.query'."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def make_meta(config: Config, num_samples: int, fingerprint: str) -> Meta:
    """What is saved beside a state: the resolved config, the position in the data, and the versions that wrote it."""
    packages = ("jax", "flax", "optax", "orbax-checkpoint")
    versions = {"spmd_lm": spmd_lm.__version__} | {name: version(name) for name in packages}
    return {"config": config, "data": {"samples": num_samples, "fingerprint": fingerprint}, "versions": versions}


class Checkpointer:
    """The checkpoints under `directory`, of which the newest `keep` are kept.

    Only `save` creates or deletes anything, so that other processes can read a running job's directory."""

    def __init__(self, directory: Path, keep: int = 2, asynchronous: bool = True):
        self.directory = Path(directory).absolute()  # orbax refuses relative paths
        self._keep = keep
        self._asynchronous = asynchronous
        self._writer: ocp.training.Checkpointer | None = None
        self._saving = -1  # step of the last save started

    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        names = (path.parent.name for path in self.directory.glob(f"*/{COMMITTED}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def latest_step(self) -> int | None:
        return max(self.steps(), default=None)

    def meta(self, step: int) -> Meta:
        with self._reading(step) as path:
            return ocp.load_checkpointables(path, {"meta": None})["meta"]

    def restore(self, step: int, abstract_state: Tree) -> tuple[Tree, Meta]:
        """The state of `step`, bit for bit, in the shardings of `abstract_state`; and its meta.

        Raises CheckpointError, before any array is read, for a missing or extra leaf, or another shape or dtype.
        Of the OPTIONAL_FIELDS an extra one is not read, and a missing one becomes None."""
        fields = self._restore_fields(step, _present_fields(abstract_state))
        state = fields if isinstance(abstract_state, dict) else dataclasses.replace(abstract_state, **fields)
        return state, self.meta(step)

    def restore_params(self, step: int, abstract_params: Tree) -> Tree:
        """The parameters of `step` alone, a third of the state, as `restore` would return them."""
        return self._restore_fields(step, {"params": abstract_params}, partial=True)["params"]

    def param_shapes(self, step: int) -> Shapes:
        """The canonical shapes and dtypes of the parameters of `step`."""
        return _shapes(self._saved_fields(step)["params"])

    def restore_params_by_path(self, step: int, abstract_params: Shapes) -> dict[str, jax.Array]:
        """Some of the parameters of `step`, as `restore` would return them.  Each must exist, in this shape."""
        nested = unflatten_dict(abstract_params, sep=".")
        return flatten_dict(self._load(step, {"params": nested}, partial=True)["params"], sep=".")

    def save(self, step: int, state: Tree, meta: Meta) -> None:
        """Saves, in the background if asynchronous.  CheckpointError if this save or the one before it failed."""
        self.wait()
        self._saving = step
        with self._writing():
            if self._writer is None:
                self._writer = ocp.training.Checkpointer(
                    self.directory, preservation_policy=self, cleanup_tmp_directories=True
                )
            # A directory of this name that is not a checkpoint, or no longer one, is replaced.
            overwrite = (self.directory / str(step)).exists() and step not in self.steps()
            # force: orbax otherwise skips, silently, a step that is older than its newest.
            parts = {"state": _present_fields(state), "meta": meta}
            self._writer.save_checkpointables_async(step, parts, force=True, overwrite=overwrite)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Blocks until the last save is committed.  CheckpointError if it failed."""
        if self._writer is not None:
            with self._writing():
                self._writer.wait()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._writing():
                writer.close()

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        """Orbax's LatestN, but a foreign directory with a number for a name neither counts nor is deleted.

        Orbax asks while a save is in progress and deletes once it is committed."""
        ours = {*self.steps(), self._saving}
        newest = sorted(ours)[-self._keep :]
        return [info.step in newest or info.step not in ours for info in checkpoints]

    def _restore_fields(self, step: int, fields: dict[str, Tree], partial: bool = False) -> dict[str, Tree]:
        """These fields of a saved state; None for OPTIONAL_FIELDS that it lacks.  partial: ignore all its others."""
        saved = self._saved_fields(step)
        present = {name: field for name, field in fields.items() if name in saved or name not in OPTIONAL_FIELDS}
        ignored = {name for name in saved if name not in fields and (partial or name in OPTIONAL_FIELDS)}
        expected = {name: field for name, field in saved.items() if name not in ignored}
        if differences := _differences(_shapes(expected), _shapes(present)):
            header = f"{self.directory / str(step)} holds a different state than this configuration expects:"
            raise CheckpointError("\n".join([header, *differences]))
        return dict.fromkeys(fields) | self._load(step, present, partial=bool(ignored))

    def _load(self, step: int, abstract_fields: dict[str, Tree], partial: bool) -> dict[str, Tree]:
        context = ocp.Context()
        context.pytree.loading.partial_load = partial
        with self._reading(step) as path, context:
            return ocp.load_checkpointables(path, {"state": abstract_fields})["state"]

    def _saved_fields(self, step: int) -> dict[str, Tree]:
        """The fields of a saved state, with shapes and dtypes for leaves."""
        with self._reading(step) as path:
            saved = ocp.metadata(path, "state").metadata
            if saved is None:  # orbax only logs the reason
                raise ValueError("the metadata of its arrays is missing or damaged")
        return saved

    @contextmanager
    def _reading(self, step: int) -> Iterator[Path]:
        path = self.directory / str(step)
        try:
            yield path
        except Exception as error:
            others = [other for other in self.steps() if other != step] or "none"
            raise CheckpointError(
                f"{path} cannot be read: {_reason(error)}\n"
                f"If it is damaged, move it away to resume from an older step (available: {others})."
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            existing = next(path for path in (self.directory, *self.directory.parents) if path.exists())
            raise CheckpointError(
                f"{self.directory / str(self._saving)} was not saved: {_reason(error)}\n"
                f"{shutil.disk_usage(existing).free:,} bytes are free in {existing}. "
                f"Intact steps: {self.steps() or 'none'}."
            ) from error


def _reason(error: BaseException) -> str:
    """The first line of the root cause: orbax wraps every failure to load in a long error about handlers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def _present_fields(state: Tree) -> dict[str, Tree]:
    """A state's fields without those that are None: orbax would write these too, and require them on restore."""
    if isinstance(state, dict):
        return state
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in fields.items() if value is not None}


def _shapes(tree: Tree) -> Shapes:
    """Shapes and dtypes by path.  Orbax returns a dataclass as a dict; the paths are the same."""
    leaves = leaves_by_path(tree).items()
    return {name: jax.ShapeDtypeStruct(tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in leaves}


def _differences(saved: Shapes, expected: Shapes) -> list[str]:
    def show(leaf: jax.ShapeDtypeStruct | None) -> str:
        return "nothing" if leaf is None else f"{leaf.dtype}{[*leaf.shape]}"

    names = sorted({name for name, _ in saved.items() ^ expected.items()})
    return [f"  {name}: saved {show(saved.get(name))}, expected {show(expected.get(name))}" for name in names]
