"""Converts PEFT's directories, adapter_config.json and adapter_model.safetensors, to and from the adapters of a run.

PEFT's A [rank, inputs] and B [outputs, rank] are our a and b, transposed unless our matrix is [outputs, inputs].  If
one Hugging Face matrix joins several of ours, they share A: import copies it to each; export writes equal copies once,
and stacks unequal ones."""

import dataclasses
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd_lm.checkpoints.init_from import PretrainedRun
from spmd_lm.checkpoints.new_run import copy_tokenizer, write_new_run
from spmd_lm.checkpoints.restored import meta_of_base, open_run, restore_trained
from spmd_lm.config.adapters import IA3, SUFFIX, Adapter, LoRA, is_adapter
from spmd_lm.config.layers import path_in_block
from spmd_lm.config.load import CONFIG_FILE, TOKENIZER_DIR, checked, load_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.tokenizers.vocabulary import CONFIG_JSON
from spmd_lm.errors import ConfigError, NonFiniteError
from spmd_lm.huggingface.architectures import HFTensor, TensorPart
from spmd_lm.huggingface.config_json import build_config
from spmd_lm.huggingface.directory import copy_files, tokenizer_files
from spmd_lm.huggingface.peft_config import ADAPTER_CONFIG, ADAPTER_FILE, validated_settings
from spmd_lm.huggingface.safetensors_io import FLOAT_DTYPES, SafetensorsReader, read_json, write_json, write_tensors
from spmd_lm.huggingface.transfer import SOURCE_FILE, STATE, cast, gather_param
from spmd_lm.models.adapters import LowRank, Scaling
from spmd_lm.parallel.trees import Tree, from_paths, leaves_by_path
from spmd_lm.runtime.directories import atomic_directory, require_absent_or_empty
from spmd_lm.runtime.formatting import abbreviate
from spmd_lm.runtime.processes import require_single_process
from spmd_lm.step.program import Program

PREFIX = "base_model.model."  # in names of tensors

TASK_TYPES = {"causal_lm": "CAUSAL_LM", "classification": "SEQ_CLS", "span": "QUESTION_ANS"}


class AdaptedModule(NamedTuple):
    """A Hugging Face module with an adapter."""

    name: str
    tensor: HFTensor  # its weight
    parts: tuple[tuple[TensorPart, LowRank | Scaling], ...]  # its adapted parts

    @property
    def transposed(self) -> bool:
        return self.parts[0][1].transposed

    @property
    def outputs(self) -> int:
        return self.tensor.parts[0].shape[0] if self.transposed else sum(part.shape[1] for part in self.tensor.parts)

    def rows(self, part: TensorPart) -> np.ndarray:
        """The rows of B that belong to this part's outputs."""
        if self.transposed:
            return np.arange(self.outputs)
        groups, size = self.tensor.groups, part.shape[1] // self.tensor.groups
        starts = np.arange(groups) * (self.outputs // groups) + part.start
        return (starts[:, None] + np.arange(size)).reshape(-1)


class PeftNames:
    """Maps a run's trained parameters to PEFT's tensors, both ways.  Raises ConfigError if Hugging Face lacks the
    model."""

    def __init__(self, config: RunConfig, program: Program, *runs: Path):
        """runs: where to look for an imported config.json, which names the family."""
        files = (run / TOKENIZER_DIR / CONFIG_JSON for run in runs)
        model_type = next((str(read_json(file).get("model_type")) for file in files if os.path.lexists(file)), "")
        self.architecture, _ = build_config(config.model, config.objective, model_type)
        self.leaves = leaves_by_path(program.plan.trained(program.plan.shapes))
        uncoded = dataclasses.replace(program.model, base=None)
        shapes = {path: leaf.shape for path, leaf in leaves_by_path(uncoded.shapes).items()}
        base = {path: shape for path, shape in shapes.items() if not is_adapter(path.split("."))}
        tensors, adapters = self.architecture.tensors(base, config.model.heads), dict(program.model.adapters)
        assert isinstance(config.adapter, Adapter)
        self.adapter, self.objective = config.adapter, config.objective
        self.all_modules = {
            tensor.name.removesuffix(".weight") for tensor in tensors if tensor.name.endswith(".weight")
        }
        self.ties_trained_table = "embedding.tokens" in self.leaves and config.objective.ties_embeddings(config.model)
        self.dtype = np.dtype(config.precision.params)
        self.modules: list[AdaptedModule] = []
        self.tensors: dict[str, HFTensor] = {}  # trained directly, by PEFT's names
        for tensor in tensors:
            module, _, kind = tensor.name.rpartition(".")
            parts = [(part, adapters.get(path_in_block(part.param))) for part in tensor.parts]
            adapted = tuple((part, adapter) for part, adapter in parts if adapter is not None)
            if kind == "weight" and adapted:
                self.modules.append(AdaptedModule(module, tensor, adapted))
            elif trained := [part.param for part, _ in parts if part.param in self.leaves]:
                if len(trained) < len(parts):
                    raise ConfigError(
                        f"{', '.join(trained)} are trained, but only a part of {tensor.name}. Train all of it."
                    )
                self.tensors[tensor.name] = tensor
        wrapped = {f"{module.name}.bias": f"{module.name}.base_layer.bias" for module in self.modules}
        self.tensors = {PREFIX + wrapped.get(name, name): tensor for name, tensor in self.tensors.items()}

    def read(self, directory: Path) -> dict[str, np.ndarray]:
        """Parameters by path from a PEFT directory, which may lack a task's head.  Raises ConfigError for missing,
        unknown, misshapen or non-float tensors; NonFiniteError for NaN and infinity."""
        reader, names = SafetensorsReader(directory, ADAPTER_FILE), set[str]()
        params = {
            path: np.empty(leaf.shape, leaf.dtype) for path, leaf in self.leaves.items() if is_adapter(path.split("."))
        }

        def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
            names.add(name)
            if name not in reader.tensors:
                raise ConfigError(f"{directory}: {name} is missing. Download {ADAPTER_FILE} again.")
            if (dtype := reader.tensors[name].get_dtype()) not in FLOAT_DTYPES.values():
                raise ConfigError(f"{directory}: {name} is of dtype {dtype}, not of floating-point numbers.")
            if (found := tuple(reader.tensors[name].get_shape())) != shape:
                raise ConfigError(f"{directory}: {name} is {[*found]}, not {[*shape]}: it is of another model.")
            with np.errstate(over="ignore"):
                value = reader.read(name, tuple((0, size) for size in shape)).astype(self.dtype)
            if not np.isfinite(value).all():
                raise NonFiniteError(f"{directory}: {name} has values that are not finite in {self.dtype}.")
            return value

        for module in self.modules:
            for part, adapter in module.parts:
                if isinstance(adapter, Scaling):
                    shape = (1, part.shape[1]) if module.transposed else (module.outputs, 1)
                    scale = read(f"{PREFIX}{module.name}.ia3_l", shape).reshape(-1)
                    own = scale if module.transposed else scale[module.rows(part)]
                    params[f"{part.param}{SUFFIX}.scale"][part.at] = own
                    continue
                inputs = part.shape[1 if module.transposed else 0]
                a = read(f"{PREFIX}{module.name}.lora_A.weight", (adapter.rank, inputs))
                b = read(f"{PREFIX}{module.name}.lora_B.weight", (module.outputs, adapter.rank))[module.rows(part)]
                path = part.param + SUFFIX
                params[f"{path}.a"][part.at] = a if module.transposed else a.T
                params[f"{path}.b"][part.at] = b if module.transposed else b.T
        for name, tensor in self.tensors.items():
            if name not in reader.tensors and not self._is_saved(name):
                continue
            value = read(name, tensor.shape)
            for part in tensor.parts:
                leaf = self.leaves[part.param]
                params.setdefault(part.param, np.empty(leaf.shape, leaf.dtype))
                index = tuple((0, size) for size in part.shape)
                slices = tuple(slice(*bounds) for bounds in tensor.index(part, index))
                params[part.param][part.at] = tensor.pick(part, index, value[slices])
        if unread := sorted(reader.tensors.keys() - names):
            raise ConfigError(f"{directory}: {abbreviate(unread)}: no parameter of this adapter. Download it again.")
        return params

    def _is_saved(self, name: str) -> bool:
        """True if a PEFT directory must have it: modules_to_save names it, or biases train."""
        module = name.rpartition(".")[0]
        saved = any(module.endswith(f".{each}") or f".{each}." in module for each in self.adapter.modules_to_save)
        return saved or getattr(self.adapter, "bias", "none") != "none"

    def write(self, params: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """(tensors by name, adapter_config.json) for a run's trained parameters, by path."""
        own = self._low_rank(self.adapter, params) if isinstance(self.adapter, LoRA) else self._scales(params)
        tensors, settings = own
        for name, tensor in self.tensors.items():
            tensors[name] = tensor.join(params[part.param][part.at] for part in tensor.parts)
        saved = (name.removeprefix(PREFIX).rpartition(".") for name in self.tensors)
        return tensors, settings | {
            "task_type": TASK_TYPES.get(self.objective.kind),
            "target_modules": self._targets(dict.fromkeys(_in_layer(module.name) for module in self.modules)),
            "modules_to_save": [*dict.fromkeys(module for module, _, kind in saved if kind == "weight")] or None,
            "fan_in_fan_out": self.architecture.model_type == "gpt2",
            "inference_mode": True,
        }

    def _low_rank(
        self, adapter: LoRA, params: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        tensors, ranks, alphas = dict[str, np.ndarray](), dict[str, int](), dict[str, float]()
        shared = {_in_layer(module.name) for module in self.modules}
        shared -= {_in_layer(module.name) for module in self.modules if not _has_one_input_factor(module, params)}
        for module in self.modules:
            name = _in_layer(module.name)
            a, b, scaling = _joined(module, params, one_input_factor=name in shared)
            tensors[f"{PREFIX}{module.name}.lora_A.weight"], tensors[f"{PREFIX}{module.name}.lora_B.weight"] = a, b
            ranks[name], alphas[name] = len(a), scaling * (len(a) ** 0.5 if adapter.rslora else len(a))
        (rank, _), *_ = Counter(ranks.values()).most_common()
        (alpha, _), *_ = Counter(alphas.values()).most_common()
        return tensors, {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": adapter.dropout,
            "use_rslora": adapter.rslora,
            "rank_pattern": {self._key(name): each for name, each in ranks.items() if each != rank},
            "alpha_pattern": {self._key(name): each for name, each in alphas.items() if each != alpha},
            "ensure_weight_tying": self.ties_trained_table,
            "bias": adapter.bias,
        }

    def _scales(self, params: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        tensors = dict[str, np.ndarray]()
        for module in self.modules:
            stacks = {part: params[f"{part.param}{SUFFIX}.scale"] for part, _ in module.parts}
            scale = np.ones(module.parts[0][0].shape[1] if module.transposed else module.outputs, np.float32)
            for part, stack in stacks.items():
                scale[... if module.transposed else module.rows(part)] = stack[part.at]
            tensors[f"{PREFIX}{module.name}.ia3_l"] = scale[None] if module.transposed else scale[:, None]
        of_inputs = dict.fromkeys(_in_layer(module.name) for module in self.modules if module.transposed)
        return tensors, {"peft_type": "IA3", "feedforward_modules": self._targets(of_inputs) if of_inputs else []}

    def require_inputs(self, directory: Path) -> None:
        """Raises ConfigError if feedforward_modules are not exactly the modules whose inputs we scale."""
        given = read_json(directory / ADAPTER_CONFIG).get("feedforward_modules") or []
        for module in self.modules:
            is_given = (
                re.fullmatch(given, module.name)
                if isinstance(given, str)
                else any(f".{module.name}".endswith(f".{each}") for each in given)
            )
            if bool(is_given) != module.transposed:
                what = "outputs" if module.transposed else "inputs"
                raise ConfigError(
                    f"{directory / ADAPTER_CONFIG}: feedforward_modules: {module.name} has its {what} scaled, which is "
                    "not implemented here. Such an adapter cannot be read."
                )

    def _targets(self, names: Iterable[str]) -> list[str] | str:
        """PEFT's target_modules: names, or a pattern if one of them also ends the name of an unadapted module."""
        adapted = {module.name for module in self.modules}
        if all(self._ending(name) <= adapted for name in names):
            return [*names]
        return rf".*\.\d+\.({'|'.join(map(re.escape, names))})"

    def _key(self, name: str) -> str:
        """A rank_pattern or alpha_pattern key that matches no other module's name."""
        alone = all(_in_layer(each) == name for each in self._ending(name))
        return name if alone else rf"\d+\.{re.escape(name)}"

    def _ending(self, name: str) -> set[str]:
        return {module for module in self.all_modules if f".{module}".endswith(f".{name}")}


def _has_one_input_factor(module: AdaptedModule, params: Mapping[str, np.ndarray]) -> bool:
    """True if all parts have the same A, as after an import."""
    first, *others = (params[f"{part.param}{SUFFIX}.a"][part.at] for part, _ in module.parts)
    return all(np.array_equal(a, first) for a in others)


def _joined(
    module: AdaptedModule, params: Mapping[str, np.ndarray], *, one_input_factor: bool
) -> tuple[np.ndarray, np.ndarray, float]:
    """(A, B, scaling) of a module.  one_input_factor: the parts share A; otherwise the rows of A and columns of B of
    all parts are stacked."""
    adapters = [adapter for _, adapter in module.parts if isinstance(adapter, LowRank)]
    scaling = adapters[0].scaling
    of_a, of_b = list[np.ndarray](), list[np.ndarray]()
    for (part, _), adapter in zip(module.parts, adapters, strict=True):
        a, b = (params[f"{part.param}{SUFFIX}.{factor}"][part.at] for factor in "ab")
        own = np.zeros((module.outputs, adapter.rank), b.dtype)
        own[module.rows(part)] = (b if module.transposed else b.T) * (adapter.scaling / scaling)
        of_a.append(a if module.transposed else a.T)
        of_b.append(own)
    if one_input_factor:
        return of_a[0], sum(of_b[1:], of_b[0]), scaling
    return np.concatenate(of_a), np.concatenate(of_b, axis=1), scaling


def _in_layer(module: str) -> str:
    """self_attn.q_proj for model.layers.3.self_attn.q_proj."""
    return re.split(r"\.\d+\.", module, maxsplit=1)[1]


class AdaptedRun(NamedTuple):
    """A run whose canonical parameters come from another run and from adapters."""

    program: Program
    pretrained: PretrainedRun
    params: Tree
    adapter_size: int  # numbers read from PEFT's files


def read_adapters(directory: Path, config: RunConfig, fallback: bool = False) -> AdaptedRun:
    """The run of `config`, with the adapters of a PEFT directory.  fallback: use run.init_from's newest undamaged
    checkpoint.  Raises as `import_peft` does."""
    assert config.run.init_from
    program = Program(config, trains=False)
    pretrained = PretrainedRun(program, Path(config.run.init_from).expanduser(), fallback)
    names = PeftNames(config, program, pretrained.directory)
    if isinstance(config.adapter, IA3):
        names.require_inputs(directory)
    read, params = names.read(directory), pretrained.initial_params()
    like = leaves_by_path(params)
    leaves = like | {path: jax.device_put(value, like[path].sharding) for path, value in read.items()}
    return AdaptedRun(program, pretrained, from_paths(leaves, params), sum(value.size for value in read.values()))


def open_adapter(base: RunConfig, directory: Path, fallback: bool = False) -> tuple[Program, Tree]:
    """The program and parameters of the run `base` with the adapters in `directory`, PEFT's or another run's, in the
    layout of `base`.  fallback: use the newest undamaged checkpoints.  Raises ConfigError if there are no adapters, or
    if `base` has its own."""
    where = f"--adapter {directory}"
    if base.adapter.kind != "none":
        base_run = base.run.init_from or "another run"
        raise ConfigError(f"{where}: {base.run.directory} holds adapters itself, of {base_run}. Give that run instead.")
    base = base.model_copy(update={"optim": base.optim.model_copy(update={"freeze": ""})})
    if os.path.lexists(directory / ADAPTER_CONFIG):
        adapter = validated_settings(directory)
        run = base.run.model_copy(update={"init_from": str(base.run.directory)})
        config = checked(base.model_copy(update={"run": run, "adapter": adapter}), where)
        adapted = read_adapters(directory, config, fallback)
        return adapted.program, adapted.program.params_from_canonical(adapted.params)
    if not os.path.lexists(directory / CONFIG_FILE):
        raise ConfigError(f"{where}: neither a run ({CONFIG_FILE}) nor a directory of PEFT ({ADAPTER_CONFIG}).")
    config = load_run(directory, [f"run.init_from={base.run.directory}"])
    if config.adapter.kind == "none":
        raise ConfigError(f"{where}: adapter.kind=none, it is a run of its own. Generate from it.")
    computes = {key: getattr(base.precision, key) for key in ("compute", "reduce", "loss_scale")}
    precision = config.precision.model_copy(update=computes)
    config = config.model_copy(update={"parallel": base.parallel, "precision": precision})
    program, params, _ = open_run(checked(config, where), fallback)
    return program, params


def import_peft(directory: Path, config: RunConfig) -> dict[str, Any]:
    """Creates run.dir, with the adapters of a PEFT directory as its checkpoint at step 0.  Raises ConfigError if
    run.dir is not empty or cannot be written, or if the tensors do not fit config.adapter; NonFiniteError for NaN or
    infinite weights; CheckpointError if run.init_from is another model."""
    require_single_process("import")
    with atomic_directory(config.run.directory) as run_dir:
        adapted = read_adapters(directory, config)
        program, pretrained = adapted.program, adapted.pretrained
        meta = meta_of_base({}, program, pretrained, lambda: adapted.params)
        write_new_run(program, adapted.params, run_dir, meta)
        copy_tokenizer(pretrained.directory, run_dir)
    return {
        "directory": str(config.run.directory),
        "architecture": f"an adapter of {pretrained.directory}",
        "step": 0,
        "parameters": adapted.adapter_size,
        "files": [ADAPTER_CONFIG, ADAPTER_FILE],
    }


def _hub_name(runs: Sequence[Path]) -> str | None:
    """ORG/NAME of the hub's model from which one of the runs was imported."""
    sources = (read_json(run / SOURCE_FILE) for run in runs if (run / SOURCE_FILE).is_file())
    names = (str(source.get("reference", "")).removeprefix("hf://").partition("@")[0] for source in sources)
    return next(filter(None, names), None)


def export_peft(config: RunConfig, target: Path, dtype: str, fallback: bool = False) -> dict[str, Any]:
    """Creates `target`, a PEFT directory with a run's newest adapters in `dtype`.  Raises as `export_hf` does."""
    require_single_process("export")
    require_absent_or_empty(target)
    program, params, step = restore_trained(config, fallback)
    bases = [Path(config.run.init_from).expanduser()] if config.run.init_from else []
    names = PeftNames(config, program, config.run.directory, *bases)
    trained = {path: gather_param(x) for path, x in leaves_by_path(params).items()}
    tensors, settings = names.write(trained)
    with atomic_directory(target) as directory:
        written = {name: cast(name, value, dtype) for name, value in tensors.items()}
        write_tensors(directory, written, iter(written.values()), sys.maxsize, ADAPTER_FILE)
        write_json(directory / ADAPTER_CONFIG, settings | {"base_model_name_or_path": _hub_name(bases)})
        tokenizer_dir = config.run.directory / TOKENIZER_DIR
        copied = tokenizer_files(tokenizer_dir)
        copy_files(tokenizer_dir, copied, directory)
    return {
        "directory": str(target),
        "architecture": f"an adapter of {names.architecture.model_type}",
        "step": step,
        "parameters": sum(value.size for value in tensors.values()),
        "files": [ADAPTER_CONFIG, ADAPTER_FILE, *copied],
        "dtype": dtype,
        "left_out": [STATE],
    }
