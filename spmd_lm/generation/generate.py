"""`spmd-lm generate`: text from a run's newest checkpoint."""

from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError
from spmd_lm.evaluation.evaluate import open_run
from spmd_lm.generation.generator import sample_text
from spmd_lm.generation.sampling import Sampling


def generate_run(config: RunConfig, prompts: list[str], sampling: Sampling) -> list[str]:
    """Each prompt and what the model adds to it; an empty one begins a document.  ConfigError for a model that reads
    both ways."""
    if not config.model.causal:
        raise ConfigError(
            f"{config.run.directory}: model.kind={config.model.kind} fills in hidden words and writes no text. "
            "Generate from a run of model.kind=gpt."
        )
    program, params, _ = open_run(config)
    return sample_text(program, params, prompts, sampling)
