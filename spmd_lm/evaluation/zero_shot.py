"""Zero-shot tasks with one compiled program: `spmd-lm eval --task` on a run's newest checkpoint, and `train.eval_tasks`
during training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from spmd_lm.checkpoints.restored import open_run
from spmd_lm.checkpoints.saved_run import load_run_data, make_run_tokenizer
from spmd_lm.config.data_sections import TRAINED_TOKENIZERS, CustomData, Instructions, Tokens
from spmd_lm.config.load import data_of_run
from spmd_lm.config.schema import CausalLM, RunConfig
from spmd_lm.config.suggest import did_you_mean
from spmd_lm.data.corpus import Corpus, Dataset
from spmd_lm.data.token_files.dataset import TokenDataset, open_test_splits
from spmd_lm.data.token_files.sharded_tokens import ShardedTokens
from spmd_lm.data.tokenizers.tokenizer import Tokenizer
from spmd_lm.errors import ConfigError, DataError
from spmd_lm.evaluation.continuations import Encoder
from spmd_lm.evaluation.scoring import Scorer
from spmd_lm.evaluation.tasks.task import EvalTask, SplitText, TaskFigures, TaskInput, find_tasks
from spmd_lm.parallel.trees import Tree
from spmd_lm.step.program import Program


def evaluate_tasks(config: RunConfig, tasks: Sequence[str], stride: int | None = None, fallback: bool = False) -> dict:
    """{"step", "tasks": {NAME: {"metrics", "n", "ci95"}}}.

    tasks: each NAME or NAME=PATH.
    stride: tokens that windows move by; None for each task's own.
    fallback: as for `open_run`.

    Raises ConfigError for a run that is not a causal language model, an unknown task or a stride that does not fit, and
    DataError for faults of a task's files; all files are read before the checkpoint is."""
    require_causal(config)
    if getattr(data_of_run(config), "tokenizer", None) in TRAINED_TOKENIZERS:
        open_run(config, fallback)  # raises if the tokenizer is gone, or the run has not begun
    with naming("--task"):
        kinds = [kind for kind, _ in parse_tasks(tasks)]
    check_stride(stride, config.model.context, kinds)
    with naming("--task"):
        made = make_tasks(config, tasks, stride)
    program, params, step = open_run(config, fallback)
    return {"step": step, "tasks": {name: each.to_dict() for name, each in score_tasks(program, params, made).items()}}


def score_tasks(program: Program, params: Tree, tasks: Sequence[EvalTask]) -> dict[str, TaskFigures]:
    scorer = Scorer(program, params)
    return {task.name: task.figures(scorer(task.windows)) for task in tasks}


def require_causal(config: RunConfig) -> None:
    """Raises ConfigError unless the run is a causal language model."""
    if not isinstance(config.objective, CausalLM):
        raise ConfigError(
            f"{config.run.directory}: objective.kind={config.objective.kind} gives a text no likelihood, which "
            "zero-shot tasks are scored by. Evaluate a run with objective.kind=causal_lm."
        )


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Prefixes errors about tasks with the key or option that names them."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"{key}: {error}") from error


def make_tasks(
    config: RunConfig, specs: Sequence[str], stride: int | None = None, data: Dataset | None = None
) -> list[EvalTask]:
    """The tasks NAME or NAME=PATH, with their items.  data: the run's own; read again if None.  Raises ConfigError and
    DataError, which begin with the task or its file."""
    parsed = parse_tasks(specs)
    encoder = Encoder(data.tokenizer if data else make_run_tokenizer(config), config.model.vocab)

    def split(name: str) -> SplitText:
        text = read_split(config, encoder.tokenizer, name, data)
        if len(text.tokens) < 2:
            way = "Raise data.validation_fraction"
            if isinstance(config.data, Tokens):
                way = f"Raise split.{name} where the data is prepared"
            raise DataError(f"{name}: the split has {len(text.tokens)} tokens. {way}.")
        return text

    return [kind(TaskInput(path, encoder, config.model.context, stride, split)) for kind, path in parsed]


def read_split(config: RunConfig, tokenizer: Tokenizer, name: str, data: Dataset | None = None) -> SplitText:
    """The run's validation or test split; a blend's corpora one after another.  Byte counts come from the headers
    of prepared shards, or from tokens that spell bytes."""
    section = data_of_run(config)
    if name == "test" and not isinstance(section, Tokens):
        what = f"data.source={section.source} has no test split, as data sets of `spmd-lm prepare` may have"
        raise ConfigError(f"test: {what}. Use validation.")
    if name == "test":
        assert isinstance(section, Tokens)
        return read_shards(open_test_splits(section, tokenizer, config.model.vocab), tokenizer)
    if isinstance(section, CustomData | Instructions):
        what = f"data.source={section.source} has rows, and no text"
        raise ConfigError(f"validation: {what}. Leave it out.")
    data = data or load_run_data(config)
    if isinstance(data, Corpus):
        return SplitText(data.validation, count_bytes(data.tokenizer, data.validation))
    assert isinstance(data, TokenDataset)
    return read_shards([corpus.validation for corpus in data.corpora], data.tokenizer)


def read_shards(splits: list[ShardedTokens], tokenizer: Tokenizer) -> SplitText:
    """Concatenates splits."""
    splits = [split for split in splits if split.size]
    read = (split.read(np.zeros(1, np.int64), split.size)[0] for split in splits)
    tokens = np.concatenate([np.empty(0, np.int32), *read])
    headers = [shard.header for split in splits for shard in split.shards]
    if all(header.tokenizer for header in headers):  # Megatron-LM's files do not record it
        return SplitText(tokens, sum(header.text_bytes for header in headers))
    return SplitText(tokens, count_bytes(tokenizer, tokens))


def count_bytes(tokenizer: Tokenizer, tokens: np.ndarray) -> int | None:
    """Bytes of the tokens' text; None if they do not spell bytes."""
    sizes = tokenizer.bytes_per_token
    return None if sizes is None else int(sizes[tokens].sum())


def parse_tasks(specs: Sequence[str]) -> list[tuple[type[EvalTask], str]]:
    """`parse_task` of each.  Raises ConfigError for a task that is given twice."""
    parsed = [parse_task(spec) for spec in specs]
    names = [kind.name for kind, _ in parsed]
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"{repeated[0]} is given twice, and figures go by its name. Evaluate one at a time.")
    return parsed


def parse_task(spec: str) -> tuple[type[EvalTask], str]:
    """The task, and its path or ''.  Raises ConfigError for one that is unknown or lacks its path."""
    (name, equals, path), known = spec.partition("="), find_tasks()
    if name not in known:
        near = did_you_mean(name, known)
        suggestion = f"Did you mean {near}?" if near else f"Tasks: {', '.join(known)}."
        raise ConfigError(f"{spec}: no task '{name}'. {suggestion}")
    if known[name].takes_path and not path:
        raise ConfigError(f"{spec}: no file is named. Write {name}=PATH.")
    if equals and not known[name].takes_path:
        raise ConfigError(f"{spec}: this task reads the run's own data. Write {name}.")
    return known[name], path


def check_stride(stride: int | None, context: int, kinds: Sequence[type[EvalTask]]) -> None:
    """Raises ConfigError for a stride that would skip tokens, or that no task uses."""
    if stride is None:
        return
    if not 1 <= stride <= context:
        raise ConfigError(
            f"--stride {stride}: windows of model.context={context} tokens move by 1 to {context} tokens, so that none "
            f"is skipped. Use --stride {min(max(stride, 1), context)}."
        )
    if not any(kind.slides for kind in kinds):
        sliding = ", ".join(name for name, kind in find_tasks().items() if kind.slides)
        raise ConfigError(f"--stride {stride}: no task here has windows that move; {sliding} have. Leave it out.")
