"""`spmd-lm quantize`: stores the blocks' matrices of a run in few bits, as a run of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from spmd_lm.checkpoints.new_run import copy_tokenizer, write_new_run
from spmd_lm.checkpoints.restored import restore_run
from spmd_lm.checkpoints.saved_run import load_run_data
from spmd_lm.config.data_sections import Data, Text
from spmd_lm.config.layers import path_in_block
from spmd_lm.config.load import checked, data_of_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import Dataset, load_data, make_loader
from spmd_lm.errors import ConfigError, DataError
from spmd_lm.evaluation.evaluate import validation_metrics
from spmd_lm.huggingface.transfer import gather_param
from spmd_lm.ops.few_bits import Coding, encode, store
from spmd_lm.parallel.trees import Tree, from_paths, leaves_by_path
from spmd_lm.quantization.calibration import Calibration, float64
from spmd_lm.quantization.gptq import Quantized, decode, gptq, round_to_nearest, squared_error
from spmd_lm.runtime.directories import atomic_directory, require_absent_or_empty
from spmd_lm.runtime.processes import require_single_process
from spmd_lm.step.program import Program, in_compute_dtype

Method = Literal["rtn", "gptq"]
METHODS = get_args(Method)
Errors = dict[str, dict[str, float]]
LEAST_HELD_OUT = 1e-6  # of a calibration text


def quantized_config(config: RunConfig, coding: Coding, directory: Path) -> RunConfig:
    """The configuration of the quantized model's run in `directory`."""
    config = in_compute_dtype(config)
    run = config.run.model_copy(update={"dir": str(directory), "init_from": None})
    few = {"quantized": coding.bits, "quantized_group": coding.group, "fake_quant": "none", "frozen": None}
    precision = config.precision.model_copy(update=few)
    optim = config.optim.model_copy(update={"freeze": ""})
    return config.model_copy(update={"run": run, "precision": precision, "optim": optim})


def quantize_run(
    config: RunConfig, target: Path, coding: Coding, method: Method, text: str | None = None, fallback: bool = False
) -> dict[str, Any]:
    """Creates `target`, a run at step 0 whose blocks' matrices are codes.

    text: files that gptq calibrates with, in place of the run's training data.  fallback: as for `restore_run`.

    Returns its `directory`, the quantized `step`, the number of `matrices`, their bytes as they were multiplied and as
    they are stored, metrics of the validation data `before` and `after`, or why there are none, and of gptq `errors`:
    |X (W - Q)|² of rounding and of gptq, for each matrix W and the inputs X that it multiplies.  What fails after it is
    written, such as evaluation, leaves the run.

    Raises ConfigError for a run with adapters, experts or codes, for inputs that groups do not divide, and if `target`
    is not empty or cannot be written; CheckpointError if there is no checkpoint; DataError for missing data."""
    require_single_process("quantize")
    require_absent_or_empty(target)
    where = config.run.directory
    if config.precision.quantized != "none":
        raise ConfigError(
            f"{where} is quantized already: {config.precision.few_bits}. Give the run that it is made of."
        )
    if config.adapter.kind != "none":
        raise ConfigError(f"{where} has adapters: adapter.kind={config.adapter.kind}. Merge them first: spmd-lm merge.")
    if config.model.share_layers and method == "gptq":
        raise ConfigError(
            "--method gptq with model.share_layers=true: layers have inputs of their own. Use --method rtn."
        )
    to = checked(quantized_config(config, coding, target), f"--bits {coding.bits}")
    calibrated_with = None if text is None else _calibration_text(config, text)
    source, params, step = restore_run(config, fallback)
    program, before = Program(to, trains=False), leaves_by_path(params)
    after, errors = _rounded(source, program, before), None
    if method == "gptq":
        codes, errors = _gptq(source, program, before, calibrated_with or load_run_data(config))
        after |= codes
    tree = from_paths(after, program.plan.shapes)
    with atomic_directory(target) as directory:
        write_new_run(program, tree, directory)
        copy_tokenizer(where, directory)
    metrics, missing = _evaluated((source, params), (program, tree))
    matrices = _matrices(source, before)
    item = np.dtype(config.precision.compute).itemsize
    return {
        "directory": str(target),
        "step": step,
        "bits": coding.bits,
        "group": coding.group,
        "method": method,
        "matrices": sum(len(before[path]) for path in matrices),
        "bytes": {
            "multiplied": sum(before[path].size for path in matrices) * item,
            "stored": sum(x.nbytes for path, x in after.items() if path not in before),
        },
        "before": metrics[0],
        "after": metrics[1],
        "not_evaluated": missing,
        "errors": errors,
    }


def _matrices(program: Program, params: Mapping[str, jax.Array]) -> dict[str, bool]:
    """Paths of stacked matrices, and whether they are multiplied transposed."""
    matrices = program.model.matrices
    return {
        path: matrices[at] for path in params if path.startswith("blocks.") and (at := path_in_block(path)) in matrices
    }


def _rounded(source: Program, program: Program, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Canonical parameters, matrices rounded to the nearest codes."""
    like, matrices = leaves_by_path(program.abstract_canonical().params), _matrices(source, params)
    result = {path: x for path, x in params.items() if path not in matrices}
    for path, transposed in matrices.items():
        of_matrix = {key.rpartition(".")[2]: x.sharding for key, x in like.items() if key.startswith(f"{path}.")}
        make = jax.jit(encode, static_argnums=(0, 2), out_shardings=of_matrix)
        coded = make(program.model.base, _as_multiplied(source.config, params[path]), transposed)
        result |= {f"{path}.{key}": x for key, x in coded.items()}
    return result


def _as_multiplied(config: RunConfig, matrix: Any) -> Any:
    """What a step rounds, after quantization-aware training: the matrix in precision.compute."""
    return matrix if config.precision.fake_quant == "none" else matrix.astype(config.precision.compute)


def _gptq(
    source: Program, program: Program, params: Mapping[str, jax.Array], corpus: Dataset
) -> tuple[dict[str, jax.Array], Errors]:
    """The matrices' codes by gptq, layer by layer, each calibrated behind quantized ones; and its errors."""
    coding, matrices = program.model.base, _matrices(source, params)
    assert coding is not None
    period, quantized, errors = source.model.period, dict[str, list[Quantized]](), Errors()
    with float64():
        embedding = {path: gather_param(x) for path, x in params.items() if path.startswith("embedding.")}
        calibration = Calibration(source.config, corpus, embedding)
        for layer in range(source.config.model.layers):
            index, place = divmod(layer, period.layers)
            stack = f"blocks.{period.keys[place]}." if period.keys else "blocks."
            of_layer = {
                path.removeprefix(stack): gather_param(x, (index,))
                for path, x in params.items()
                if path.startswith(stack)
            }
            _, grams = calibration.run(layer, of_layer)
            for path, gram in grams.items():
                transposed = matrices[stack + path]
                w = _as_multiplied(source.config, of_layer[path])
                w = w.T if transposed else w
                found, nearest = gptq(w, gram, coding), round_to_nearest(w, coding)
                value = decode(coding, found)
                errors[f"blocks.{layer}.{path}"] = {
                    "rtn": squared_error(w, decode(coding, nearest), gram),
                    "gptq": squared_error(w, value, gram),
                }
                quantized.setdefault(stack + path, []).append(found)
                of_layer[path] = value.T if transposed else value
            calibration.x, _ = calibration.run(layer, of_layer)
    if unseen := sorted(matrices.keys() - quantized.keys()):
        raise ConfigError(f"--method gptq: {unseen[0]} multiplies nothing that its block shows. Use --method rtn.")
    like, codes = leaves_by_path(program.abstract_canonical().params), dict[str, jax.Array]()
    for path, of_layers in quantized.items():
        each, absmax = (np.stack(of_each) for of_each in zip(*of_layers, strict=True))
        if matrices[path]:
            each, absmax = each.swapaxes(1, 2), absmax.swapaxes(1, 2)
        for key, x in store(coding, jnp.asarray(each), jnp.asarray(absmax), matrices[path]).items():
            codes[f"{path}.{key}"] = jax.device_put(x, like[f"{path}.{key}"].sharding)
    return codes, errors


def _evaluated(*runs: tuple[Program, Tree]) -> tuple[list[dict[str, float] | None], str]:
    """For each run the metrics of its validation data; or None, and why there are none, as for an imported run.  Trees:
    canonical parameters."""
    config, modules = runs[0][0].config, runs[0][0].model.modules
    try:
        loader = make_loader(config, load_run_data(config), "validation")
    except (DataError, ConfigError) as error:
        return [None] * len(runs), str(error)
    if not modules.has_eval_sums:
        return [None] * len(runs), "the head of one's own has no eval_sums"
    return [validation_metrics(program, program.params_from_canonical(tree), loader)[0] for program, tree in runs], ""


def _calibration_text(config: RunConfig, text: str) -> Dataset:
    """Text for gptq.  Raises ConfigError for a run of other data, and DataError if it cannot be read."""
    if not isinstance(config.data, Data) or not config.objective.predicts_tokens:
        what = f"data.source={config.data.source}, objective.kind={config.objective.kind}"
        raise ConfigError(f"--calibrate {text}: a run with {what} is calibrated with its own data. Leave it out.")
    own = data_of_run(config)
    assert isinstance(own, Data)
    data = Text(source="text", path=text, tokenizer=own.tokenizer, bos=own.bos, validation_fraction=LEAST_HELD_OUT)
    try:
        return load_data(data, config.train.seed, config.model.vocab)
    except DataError as error:
        raise DataError(f"--calibrate {text}: {error}") from None
