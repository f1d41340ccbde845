"""The part of an imported run's config.json that its export keeps."""

from collections.abc import Mapping
from typing import Any

from spmd_lm.config.schema import Classification, Model, RunConfig
from spmd_lm.huggingface.architectures import SPECIAL_TOKEN_KEYS
from spmd_lm.huggingface.config_json import comparable, label_names, parse_config

LABEL_KEYS = {"id2label", "label2id"}
TASK_KEYS = {"finetuning_task", "num_labels", "problem_type"}  # stale once a head is trained on another task
DTYPE_KEYS = {"dtype", "torch_dtype"}  # transformers 5 writes the first, older versions the second
CODE_KEY = "auto_map"  # names Python files of the model's own, which are not copied
CHANGEABLE = {
    "dropout",
    "attention_dropout",
    "context",
    "balance_losses",
}  # keys of section `model` that import lets the user change


def restore_keys(built: Mapping[str, Any], source: Mapping[str, Any], config: RunConfig, step: int) -> dict[str, Any]:
    """The config.json of an export: `built`, from the run's model, with all keys of `source` that do not contradict it.

    source: the run's imported config.json.  If it is another model's, whose tokenizer the run uses, only its special
      tokens are kept.
    step: the checkpoint's; after training, names of classes are those of the run's task, if it has any."""
    special = {key: value for key, value in source.items() if key in SPECIAL_TOKEN_KEYS}
    names = label_names(config, source, is_trained=step > 0)
    wanted, model = _parse(built), _parse(source)
    if wanted is None or model is None or {key for key in model[0] if model[0][key] != wanted[0][key]} - CHANGEABLE:
        return {**built, **special, **names}
    dropped = {"architectures", CODE_KEY} | DTYPE_KEYS
    if isinstance(config.objective, Classification):
        dropped |= LABEL_KEYS | (TASK_KEYS if step or source.get("architectures") != built["architectures"] else set())
    restored = {
        key: value for key, value in source.items() if key not in dropped and _parse({**built, key: value}) == wanted
    }
    own = {key: value for key, value in built.items() if key not in SPECIAL_TOKEN_KEYS}  # no null if unset there
    return {**own, **(restored if _parse({**own, **restored}) == wanted else {}), **special, **names}


def _parse(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The sections `model` and `objective` of a config.json; None if the model is not supported."""
    try:
        parsed = parse_config(hf_config)
        model = Model.model_validate(parsed.model)
    except ValueError:  # ours or pydantic's
        return None
    balance_losses = {"balance_losses": [each.balance_loss for each in model.mixtures]}
    return model.model_dump() | comparable(model.model_dump()) | balance_losses, parsed.objective
