"""`spmd-lm generate`: text from a run's newest checkpoint."""

from spmd_lm.config.schema import RunConfig
from spmd_lm.train.evaluate import open_run
from spmd_lm.train.sample import sample_text
from spmd_lm.train.sampling import Sampling


def generate_run(config: RunConfig, prompts: list[str], sampling: Sampling) -> list[str]:
    """Each prompt and what the model adds to it; an empty one begins a document."""
    program, params, _ = open_run(config)
    return sample_text(program, params, prompts, sampling)
