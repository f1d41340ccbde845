"""Converts PEFT's adapter_config.json to the section `adapter`.  Does not import jax, so errors come at once."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spmd_lm.config.adapters import ALL_LINEAR, Adapter
from spmd_lm.config.load import VALIDATORS, Layer, given_value, load, load_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.config.suggest import wrong_values
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.directory import DEFAULTS
from spmd_lm.huggingface.safetensors_io import SafetensorsReader, read_json

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"

ANY_KIND: dict[str, tuple[str, Any]] = {
    "target_modules": ("targets", None),
    "modules_to_save": ("modules_to_save", []),
}
SETTING_OF_KEY = {
    "LORA": ANY_KIND
    | {
        "r": ("rank", 8),
        "lora_alpha": ("alpha", 8),
        "lora_dropout": ("dropout", 0.0),
        "use_rslora": ("rslora", False),
        "bias": ("bias", "none"),
        "rank_pattern": ("rank_pattern", {}),
        "alpha_pattern": ("alpha_pattern", {}),
    },
    "IA3": ANY_KIND,
}
"""Keys of adapter_config.json by peft_type, each with our key and PEFT's default."""
NEUTRAL = {
    *("peft_type", "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "peft_version"),
    *("revision", "task_type", "qalora_group_size", "init_lora_weights", "megatron_core", "ensure_weight_tying"),
    *("feedforward_modules", "init_ia3_weights"),
}
"""Keys that leave an adapter's computation unchanged."""


def read_settings(directory: Path) -> dict[str, Any]:
    """The section `adapter` for an adapter_config.json.  Raises ConfigError, one line per key, for unsupported
    settings."""
    path = directory / ADAPTER_CONFIG
    given = read_json(path)
    kind = given.get("peft_type")
    if not isinstance(kind, str) or kind not in SETTING_OF_KEY:
        raise ConfigError(
            f"{path}: peft_type={json.dumps(kind):.40} is not supported. Supported: {', '.join(SETTING_OF_KEY)}."
        )
    keys = SETTING_OF_KEY[kind]
    problems = [
        f"{path}: {key}={json.dumps(value):.80} is not implemented here. Such an adapter cannot be read."
        for key, value in given.items()
        if key not in keys and key not in NEUTRAL and value not in (None, False, [], {}, "")
    ]
    if not isinstance(init := given.get("init_lora_weights", True), bool) and init not in (
        "gaussian",
        "orthogonal",
        None,
    ):
        problems.append(f"{path}: init_lora_weights={init} may change the base. Have PEFT save it as plain LoRA.")
    for key in ("rank_pattern", "alpha_pattern"):
        names = given.get(key) if isinstance(given.get(key), dict) else {}
        # Other patterns take exponential time in the length of a name, and the directory may be anybody's.
        odd = [name for name in names or {} if re.search(r"[*+?{]", name.replace(r"\d+", "").replace(".*", "", 1))]
        problems += [f"{path}: {key}: {name:.80} is not implemented here. Write names." for name in odd]
    if problems:
        raise ConfigError(*problems)
    if isinstance(targets := given.get("target_modules"), str) and targets != ALL_LINEAR:
        given |= {"target_modules": _modules(directory)}  # for the same reason
    values = {ours: given.get(theirs) for theirs, (ours, _) in keys.items()}
    defaults = dict(keys.values())
    return {"kind": kind.lower()} | {key: defaults[key] if value is None else value for key, value in values.items()}


def _modules(directory: Path) -> list[str]:
    """The modules that the tensors in a directory adapt."""
    names = (
        re.fullmatch(r"base_model\.model\.(.*)\.(lora_A\.weight|ia3_l)", name)
        for name in SafetensorsReader(directory, ADAPTER_FILE).tensors
    )
    return [name[1] for name in names if name]


def validated_settings(directory: Path) -> Adapter:
    """`read_settings` as a section."""
    settings, path = read_settings(directory), directory / ADAPTER_CONFIG
    try:
        return VALIDATORS["adapter"].validate_python(settings)
    except ValidationError as error:
        problems = (f"{path}: {problem}" for _, problem in wrong_values("adapter", error))
        raise ConfigError(*problems) from None


def make_adapter_config(directory: Path, run_dir: str, config_file: str | None, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run in `run_dir` with this adapter of the run named by run.init_from.  Raises ConfigError,
    also if there is no run.init_from, or if an override would change the adapter."""
    settings = read_settings(directory)
    base = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    run = given_value(config_file, overrides, "run", "init_from")
    if not isinstance(run, str) or not run:
        raise ConfigError(
            f"{directory} is an adapter of {base or 'a model that it does not name'}. Import that first, and name its "
            "run, as in run.init_from=runs/base."
        )
    adapter = Layer(str(directory / ADAPTER_CONFIG), {"adapter": settings, "run": {"dir": run_dir}})
    sections = {"objective", "data", "precision"}
    of_base = load_run(Path(run).expanduser()).model_dump(by_alias=True, include=sections)
    config = load(config_file, overrides, under=Layer("defaults of import", DEFAULTS | of_base), cell=adapter)
    problems = []
    for key, value in validated_settings(directory):
        if key != "base" and (other := getattr(config.adapter, key, value)) != value:
            problems.append(f"adapter.{key}={other}: {directory / ADAPTER_CONFIG} sets {value}. Leave it out.")
    if config.run.dir != run_dir:
        problems.append(f"run.dir={config.run.dir}: the run is created in {run_dir}. Leave it out.")
    if problems:
        raise ConfigError(*problems)
    return config
