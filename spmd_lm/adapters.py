"""Resolves `adapter.targets` and `adapter.modules_to_save`, in this project's names or Hugging Face's, for a model."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from spmd_lm.config.adapters import (
    ALL_LINEAR,
    CODED,
    HF_LAYERS,
    HF_MODULES,
    HF_NAMES,
    SUFFIX,
    Adapter,
    LoRA,
    NoAdapter,
    is_adapter,
)
from spmd_lm.config.layers import layer_path, path_in_block
from spmd_lm.config.schema import Precision
from spmd_lm.config.suggest import did_you_mean
from spmd_lm.errors import ConfigError, LayoutError
from spmd_lm.models.adapters import Adapters, LowRank, Scaling
from spmd_lm.models.language_model import LanguageModel
from spmd_lm.ops.few_bits import BLOCK_SIZE, Coding
from spmd_lm.parallel.trees import leaves_by_path

CODINGS = {
    "none": None,
    "int8": Coding("int8"),
    "nf4": Coding("nf4", BLOCK_SIZE),
    "nf4-double": Coding("nf4", BLOCK_SIZE, double=True),
}
"""The codings of adapter.base."""

TASK_HEAD = "head"  # newly initialized, and so trained too, if an objective predicts no tokens


@functools.lru_cache(maxsize=64)
def adapters_of(adapter: Adapter | NoAdapter, model: LanguageModel) -> Adapters:
    """The adapters of matrices in a model's blocks, by path.  Raises ConfigError for a target that matches none, or
    matches in some layers only."""
    if isinstance(adapter, NoAdapter):
        return ()
    chosen = _of_layers("targets", _targets(adapter.targets), model)
    if not isinstance(adapter, LoRA):
        if model.modules.own_block:
            raise ConfigError(
                "adapter.kind=ia3: a block of one's own may add its biases in any way. Use adapter.kind=lora."
            )
        return tuple((path, Scaling(model.matrices[path])) for path in sorted(chosen))
    ranks = _of_layers("rank_pattern", _pattern("rank_pattern", adapter.rank_pattern), model)
    alphas = _of_layers("alpha_pattern", _pattern("alpha_pattern", adapter.alpha_pattern), model)

    leaves = leaves_by_path({"blocks": model.shapes["blocks"]})
    shapes = {path_in_block(path): leaf.shape[-2:] for path, leaf in leaves.items()}

    def low_rank(path: str) -> LowRank:
        rank, alpha = ranks.get(path, adapter.rank), alphas.get(path, adapter.alpha)
        if rank > (most := min(shapes[path])):
            raise ConfigError(
                f"adapter.{'rank_pattern' if path in ranks else 'rank'}={rank}: {path} is {[*shapes[path]]}, and no "
                f"matrix of its size has a rank above {most}. Use a smaller one."
            )
        return LowRank(rank, alpha / (rank**0.5 if adapter.rslora else rank), adapter.dropout, model.matrices[path])

    return tuple((path, low_rank(path)) for path in sorted(chosen))


class _Found(NamedTuple):
    find: Callable[[Sequence[str]], tuple[Collection[str], Any]]  # a matrix's names -> (targets that match, value)
    targets: Collection[str]  # all that were asked for


def _targets(targets: str | Sequence[str]) -> _Found:
    """Targets as PEFT reads them: a regular expression that matches a whole name, or names and suffixes of names."""
    if targets == ALL_LINEAR:
        return _Found(lambda names: ([ALL_LINEAR], True), [ALL_LINEAR])
    if isinstance(targets, str):
        pattern = _compiled("targets", targets)
        return _Found(lambda names: ([targets] if any(map(pattern.fullmatch, names)) else [], True), [targets])
    known = frozenset(targets)

    def find(names: Sequence[str]) -> tuple[Collection[str], Any]:
        parts = (name.split(".") for name in names)
        return known.intersection(".".join(each[i:]) for each in parts for i in range(len(each))), True

    return _Found(find, known)


def _pattern(key: str, pattern: Sequence[tuple[str, float]]) -> _Found:
    """Numbers by regular expressions that match a suffix of a name, as PEFT reads them; the first match wins."""
    compiled = [(name, _compiled(key, rf"(.*\.)?({name})"), number) for name, number in pattern]

    def find(names: Sequence[str]) -> tuple[Collection[str], Any]:
        matches = {name: number for name, each, number in compiled if any(map(each.fullmatch, names))}
        return matches.keys(), next(iter(matches.values()), None)

    return _Found(find, [name for name, _ in pattern])


def _compiled(key: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"adapter.{key}: {text:.100} is no regular expression: {error}. Mend it.") from None


def _of_layers(key: str, found: _Found, model: LanguageModel) -> dict[str, Any]:
    """The values found, by the path of their matrix in a block.  Raises ConfigError if a target matches none, or layers
    differ."""
    kind, values, unused = model.c.kind, dict[str, Any](), set(found.targets)
    for path in model.matrices:
        theirs = HF_MODULES[kind].get(path, ())
        of_layers = []
        for i in range(model.c.layers):
            names = (f"{layers}.{i}.{name}" for layers in HF_LAYERS[kind] for name in theirs)
            targets, value = found.find([path, f"blocks.{i}.{path}", *names])
            unused -= {*targets}
            of_layers.append(value if targets else None)
        if any(value != of_layers[0] for value in of_layers):
            some = ", ".join(str(i) for i, value in enumerate(of_layers) if value != of_layers[0])
            raise ConfigError(
                f"adapter.{key}: {path} is another in layers {some} than in layer 0. Here all layers have the same "
                "adapters; optim.freeze can leave those of some layers as they are."
            )
        if of_layers[0] is not None:
            values[path] = of_layers[0]
    if unused:
        target = min(unused)
        ends = (name.rpartition(".")[2] for path in model.matrices for name in HF_MODULES[kind].get(path, ()))
        near = did_you_mean(target, [ALL_LINEAR, *model.matrices, *dict.fromkeys(ends)])
        hint = f"Did you mean {near}?" if near else f"There are {', '.join(model.matrices)}."
        if near == target:
            hint = f"A text is a regular expression of a whole name. Write [{target}]."
        if not model.matrices:
            hint = "The block is no HasMatrices with parameters [width, ..]: docs/own-model.md."
        stacks = " Stacks of experts have no adapters." if model.c.mixtures else ""
        raise ConfigError(f"adapter.{key}: {target:.100} matches no matrix of a block.{stacks} {hint}")
    if key == "targets" and not values:
        raise ConfigError("adapter.targets=[] leaves nothing to train. Use adapter.targets=all-linear.")
    return values


def coding_of(adapter: Adapter | NoAdapter, precision: Precision) -> Coding | None:
    """How the blocks' matrices are quantized."""
    if precision.quantized != "none":
        return Coding(precision.quantized, precision.quantized_group)
    return CODINGS[adapter.base]


def require_whole_blocks(model: LanguageModel, shards: int) -> None:
    """Raises LayoutError if sharding over `model` would split blocks of quantized matrices: inputs that share a
    scale."""
    if model.fake_quant != "none":
        chosen, way = f"precision.fake_quant={model.fake_quant}", "precision.fake_quant=none"
    elif model.base is None:
        return
    elif model.adapters:
        chosen, way = f"adapter.base={model.base.name}", "adapter.base=int8"
    else:
        chosen, way = f"precision.quantized={model.base.name}", "spmd-lm quantize with another group"
    size = BLOCK_SIZE if model.base is None else model.base.whole
    shapes = leaves_by_path(dataclasses.replace(model, base=None).shapes["blocks"])
    for path, leaf in shapes.items():
        if model.matrices.get(path_in_block(f"blocks.{path}")) and (leaf.shape[-1] // size) % shards:
            blocks = leaf.shape[-1] // size
            fits = ", ".join(str(n) for n in range(1, shards) if blocks % n == 0 and shards % n == 0)
            raise LayoutError(
                f"{chosen}: parallel.model={shards} would cut groups of {size} inputs, of which {path} has "
                f"{blocks}. Use parallel.model={fits.replace(', ', ' or ')}, or {way}."
            )


def require_free_names(model: LanguageModel) -> None:
    """Raises ConfigError if a user's parameter has a name reserved for adapters or quantized matrices."""
    for path in _paths(model):
        if is_adapter(path.split(".")) or path.rpartition(".")[2] in CODED:
            raise ConfigError(
                f"{path}: names that end in {SUFFIX} are of adapters, and {', '.join(CODED)} of matrices in few bits. "
                "Rename this parameter."
            )


def trainable_paths(
    adapter: Adapter | NoAdapter, model: LanguageModel, freeze: Sequence[str] = ()
) -> frozenset[str] | None:
    """Paths of adapters, of `modules_to_save` and of a task's head; without adapters of all that is not quantized, or
    None for all.
    freeze: patterns of optim.freeze.  Raises ConfigError for modules_to_save that are missing, quantized or frozen."""
    paths = _paths(model)
    if isinstance(adapter, NoAdapter):
        return frozenset(path for path in paths if path.rpartition(".")[2] not in CODED) if model.base else None
    own = [path for path in paths if not is_adapter(path.split("."))]
    saved = {each: _parameters_of(each, own) for each in adapter.modules_to_save}
    for each, parts in saved.items():
        if not parts:
            if _our_name(each) == "head.tokens" and model.objective.ties_embeddings(model.c):
                raise ConfigError(
                    f"adapter.modules_to_save: {each} is the token table of the embedding (model.tie_embeddings=true). "
                    "Use embedding.tokens, which trains both, or model.tie_embeddings=false."
                )
            theirs = [name for name in HF_NAMES if _parameters_of(name, own)]
            ours = {".".join(path.split(".")[:count]) for path in own for count in range(1, 6)}
            near = did_you_mean(each, [*sorted(ours), *theirs])
            hint = f"Did you mean {near}?" if near else f"Names are like {own[0]} and {own[-1]}."
            raise ConfigError(f"adapter.modules_to_save: {each} is no part of this model. {hint}")
    if not model.objective.predicts_tokens:
        saved[TASK_HEAD] = _parameters_of(TASK_HEAD, own)
    for each, parts in saved.items():
        if coded := [path for path in parts if path.rpartition(".")[2] in CODED]:
            what = f"adapter.modules_to_save: {each} is in few bits (adapter.base={adapter.base}), as {coded[0]}"
            raise ConfigError(f"{what}. Leave it out, or use adapter.base=none.")
        if frozen := [pattern for pattern in freeze if all(fnmatchcase(path, pattern) for path in parts)]:
            raise ConfigError(
                f"optim.freeze={frozen[0]} freezes all of {each}, which the adapter trains. Leave it out."
            )
    _require_one_training(saved, freeze, model)
    adapters = set(paths).difference(own)
    return frozenset(adapters.union(*saved.values(), (path for path in own if _trains_bias(adapter, path, model))))


def _require_one_training(saved: Mapping[str, Sequence[str]], freeze: Sequence[str], model: LanguageModel) -> None:
    """Raises ConfigError for a matrix that `saved` trains in addition to its adapter, or whose adapter is frozen."""
    for path, _ in model.adapters:
        if parts := [each for each, paths in saved.items() if f"blocks.{path}" in paths]:
            raise ConfigError(
                f"adapter.modules_to_save: {parts[0]} trains {path} itself, which has an adapter too. Leave it out of "
                "adapter.modules_to_save, or of adapter.targets."
            )
        if any(_freezes(freeze, f"blocks.{path}{SUFFIX}.{key}", model) for key in ("a", "b", "scale")):
            raise ConfigError(
                f"optim.freeze={' '.join(freeze)} freezes the adapter of {path}. Leave {path} out of adapter.targets."
            )


def _freezes(freeze: Sequence[str], path: str, model: LanguageModel) -> bool:
    """True if optim.freeze matches this parameter of a block in all layers."""
    names = (path.replace("blocks", f"blocks.{layer}", 1) for layer in range(model.c.layers))
    return all(any(fnmatchcase(name, pattern) for pattern in freeze) for name in names)


def _paths(model: LanguageModel) -> list[str]:
    """Paths of the parameters, without the keys of places in a period."""
    paths = (layer_path(tuple(path.split("."))) for path in leaves_by_path(model.shapes))
    return [*dict.fromkeys(".".join(path) for _, path in paths)]


def _trains_bias(adapter: Adapter, path: str, model: LanguageModel) -> bool:
    if not isinstance(adapter, LoRA) or adapter.bias == "none" or not path.endswith("bias"):
        return False
    of = path.removeprefix("blocks.").removesuffix("_bias")
    return adapter.bias == "all" or any(of == adapted for adapted, _ in model.adapters)


def _parameters_of(part: str, own: Sequence[str]) -> list[str]:
    """Paths in `own` that belong to a part of the model, by our name or Hugging Face's: head.norm, model.norm."""
    for name in (part, _our_name(part)):
        if found := [path for path in own if f"{path.removesuffix('_bias')}.".startswith(f"{name}.")]:
            return found
    return []


def _our_name(part: str) -> str:
    return HF_NAMES.get(part.rpartition(".")[2], part)
