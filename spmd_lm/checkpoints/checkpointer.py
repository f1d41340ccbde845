"""Checkpoints: the canonical state of a step and what is needed to go on from it, written atomically by orbax.

What is on disk decides: a step counts when orbax has committed it, and nothing else in the directory does.  Orbax
reports a failed background save only to whoever waits for it, so every save waits for the one before; it casts silently
on restore, so shapes and dtypes are compared before anything is read."""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
from pydantic import ValidationError

import spmd_lm
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import CheckpointError

Tree = Any  # a pytree, here a TrainState or a dict of such fields: canonical shapes, any sharding
Config = dict[str, Any]  # a RunConfig as JSON
Meta = dict[str, Any]  # JSON: config, data, versions

# Orbax writes this file last: before the rename, or instead of it on a file system that has none.
COMMITTED = "commit_success.txt"

# Differences in these make another model, for which a saved state is meaningless.
IDENTITY = ("model", "objective", "precision.params")
# ... except how a layer is computed and how it is regularized: the saved arrays mean the same.
NOT_IDENTITY = ("model.scan", "model.attention", "model.dropout", "model.attention_dropout")

# Fields of a state that a run may take up or give up on its way.
OPTIONAL = ("loss_scale",)


def make_meta(config: Config, samples: int, fingerprint: str) -> Meta:
    """What stands beside a state: the resolved config, the position in the data, and who wrote it."""
    packages = ("jax", "flax", "optax", "orbax-checkpoint")
    versions = {"spmd_lm": spmd_lm.__version__} | {name: version(name) for name in packages}
    return {"config": config, "data": {"samples": samples, "fingerprint": fingerprint}, "versions": versions}


class Checkpointer:
    """The checkpoints under `directory`, of which the newest `keep` stay.

    Only `save` creates or deletes anything, so that a running job's directory can be read from elsewhere."""

    def __init__(self, directory: Path, keep: int = 2, asynchronous: bool = True):
        self.directory = Path(directory).absolute()  # orbax refuses relative paths
        self._keep = keep
        self._asynchronous = asynchronous
        self._writer: ocp.training.Checkpointer | None = None
        self._saving = -1  # step of the last save issued

    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        names = (path.parent.name for path in self.directory.glob(f"*/{COMMITTED}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def meta(self, step: int) -> Meta:
        with self._reading(step) as path:
            return ocp.load_checkpointables(path, {"meta": None})["meta"]

    def restore(self, step: int, abstract_state: Tree) -> tuple[Tree, Meta]:
        """The state of `step`, bit for bit, in the shardings of `abstract_state`; and its meta.

        Raises CheckpointError, before any array is read, for a leaf too many or too few, or of another shape or dtype.
        Of the OPTIONAL fields one too many is left where it is, and one that is not there comes back as None.
        """
        loaded = self._load(step, _present(abstract_state))
        plain = isinstance(abstract_state, dict)
        return loaded if plain else dataclasses.replace(abstract_state, **loaded), self.meta(step)

    def restore_params(self, step: int, abstract_params: Tree) -> Tree:
        """The parameters of `step` alone, a third of the state, as `restore` would give them."""
        return self._load(step, {"params": abstract_params}, part=True)["params"]

    def parameters(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The canonical shapes and dtypes of what `step` has, by path, as in 'blocks.attention.query'."""
        found = _leaves(self._saved(step)["params"])
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in found.items()}

    def restore_some(self, step: int, abstract_params: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """These parameters of `step`, by path, as `restore` would give them.  Each must be there, in this shape."""
        nested: Tree = {}
        for name, leaf in abstract_params.items():
            *above, last = name.split(".")
            functools.reduce(lambda tree, key: tree.setdefault(key, {}), above, nested)[last] = leaf
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        with self._reading(step) as path, context:
            params = ocp.load_checkpointables(path, {"state": {"params": nested}})["state"]["params"]
        return {
            name: functools.reduce(lambda tree, key: tree[key], name.split("."), params) for name in abstract_params
        }

    def save(self, step: int, state: Tree, meta: Meta) -> None:
        """Saves, in the background if asynchronous; raises CheckpointError if this save or the one before it failed."""
        self.wait()
        self._saving = step
        with self._writing():
            if self._writer is None:
                keep = KeepNewest(self._keep, lambda: {*self.steps(), self._saving})
                self._writer = ocp.training.Checkpointer(
                    self.directory, preservation_policy=keep, cleanup_tmp_directories=True
                )
            # The number may be taken by a directory that is no checkpoint, or no longer; that one is replaced.
            taken = self._path(step).exists() and step not in self.steps()
            # force: orbax otherwise skips, without a word, a step that is older than its newest.
            parts = {"state": _present(state), "meta": meta}
            self._writer.save_checkpointables_async(step, parts, force=True, overwrite=taken)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Until the last save is committed; raises CheckpointError if it failed."""
        if self._writer is not None:
            with self._writing():
                self._writer.wait()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._writing():
                writer.close()

    def _load(self, step: int, fields: dict[str, Tree], part: bool = False) -> dict[str, Tree]:
        """The saved state's fields, None for OPTIONAL ones that it lacks; if `part`, only those that are asked for."""
        saved, path = self._saved(step), self._path(step)
        there = {name: field for name, field in fields.items() if name in saved or name not in OPTIONAL}
        wanted = {name: field for name, field in saved.items() if name in fields or not (part or name in OPTIONAL)}
        if problems := _differences(_leaves(wanted), _leaves(there)):
            raise CheckpointError("\n".join([f"{path} holds another state than this configuration makes:", *problems]))
        context = ocp.Context()
        context.pytree.loading.partial_load = len(wanted) < len(saved)
        with self._reading(step) as path, context:
            return dict.fromkeys(fields) | ocp.load_checkpointables(path, {"state": there})["state"]

    def _saved(self, step: int) -> dict[str, Tree]:
        """The saved state's fields, described."""
        with self._reading(step) as path:
            saved = ocp.metadata(path, "state").metadata
            if saved is None:  # orbax tells the reason to its log alone
                raise ValueError("the description of its arrays is missing or damaged")
        return saved

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    @contextmanager
    def _reading(self, step: int) -> Iterator[Path]:
        path = self._path(step)
        try:
            yield path
        except Exception as error:
            others = [other for other in self.steps() if other != step] or "none"
            raise CheckpointError(
                f"{path} cannot be read: {_reason(error)}\n"
                f"If it is damaged, move it away to go on from an older step (there are: {others})."
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            there = next(path for path in (self.directory, *self.directory.parents) if path.exists())
            raise CheckpointError(
                f"{self._path(self._saving)} was not saved: {_reason(error)}\n"
                f"{shutil.disk_usage(there).free:,} bytes are free in {there}. Intact steps: {self.steps() or 'none'}."
            ) from error


@dataclasses.dataclass
class KeepNewest:
    """Orbax's LatestN, but a foreign directory with a number for a name neither counts nor is deleted.

    Orbax asks while a save is under way and deletes once it is committed."""

    keep: int
    ours: Callable[[], set[int]]  # steps on disk and the one under way

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        ours = self.ours()
        newest = sorted(ours)[-self.keep :]
        return [info.step in newest or info.step not in ours for info in checkpoints]


def _reason(error: BaseException) -> str:
    """The first line of the first cause: orbax calls every failure to load an incompatible handler, at length."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def _present(state: Tree) -> dict[str, Tree]:
    """A state's fields, less those that are None: orbax would write even these, and miss them where they are not."""
    if isinstance(state, dict):
        return state
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in fields.items() if value is not None}


def _leaves(tree: Tree) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype by path.  Orbax tells of a dataclass as a dict; the path is the same."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (tuple(leaf.shape), np.dtype(leaf.dtype))
        for path, leaf in flat
    }


def _differences(old: dict, new: dict) -> list[str]:
    def show(leaf: tuple | None) -> str:
        return f"{leaf[1]}{list(leaf[0])}" if leaf else "nothing"

    return [
        f"  {name}: saved {show(old.get(name))}, wanted {show(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def check_same_run(saved: Config, config: Config, directory: Path) -> list[str]:
    """What differs between a run's saved config and today's, a line each, if it may go on in spite of it.

    Raises CheckpointError where the difference makes another model."""
    changed = _changes(saved, config)
    if other := [line for key, line in changed.items() if _under(key, IDENTITY) and not _under(key, NOT_IDENTITY)]:
        lines = [f"{directory} holds a run of another model (saved -> asked for):", *other]
        raise CheckpointError(
            "\n".join([*lines, "Choose another run.dir, or put these values back. Nothing was changed."])
        )
    return [line for key, line in changed.items() if not _under(key, ("run",))]


def check_same_model(saved: Config, config: Config, directory: Path) -> None:
    """Raises CheckpointError where a run cannot start as the one in `directory`: its rows may be shorter, what it is
    trained for may be another thing, and the rest of the model must be the same."""
    apart = (*NOT_IDENTITY, "model.context")
    changed = _changes(saved, config)
    other = [line for key, line in changed.items() if _under(key, ("model",)) and not _under(key, apart)]
    if saved["model"]["context"] < config["model"]["context"]:
        other.append(changed["model.context"])
    if other:
        raise CheckpointError(
            "\n".join(
                [
                    f"run.init_from={directory} is another model (its -> asked for):",
                    *other,
                    "Leave these keys out, and they are as they are there.",
                ]
            )
        )


def _changes(saved: Config, config: Config) -> dict[str, str]:
    """What differs, by key, a line each."""
    old, new = dict(_flatten(_with_defaults(saved))), dict(_flatten(config))
    was, is_now = old | _derived(old), new | _derived(new)
    return {
        key: f"  {key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and was.get(key) != is_now.get(key)
    }


def _derived(config: Config) -> Config:
    """Sizes that follow from others where they are not said: an imported model's are, by its config.json."""
    hidden, heads = config.get("model.mlp_width"), config.get("model.kv_heads")
    return {
        "model.mlp_width": hidden or 4 * config.get("model.width", 0),
        "model.kv_heads": heads or config.get("model.heads"),
    }


def _with_defaults(saved: Config) -> Config:
    """A key added since it was saved stood at its default; where the schema moved on further, what was saved."""
    try:
        return RunConfig.model_validate(saved).model_dump(by_alias=True)
    except ValidationError:
        return saved


def _under(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _flatten(value, f"{prefix}.{key}" if prefix else key)
