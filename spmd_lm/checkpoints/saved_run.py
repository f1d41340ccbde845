"""Opens a run's newest checkpoint to use its model, without training."""

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.compatibility import check_compatible
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import CheckpointError
from spmd_lm.parallel.plan import Tree
from spmd_lm.step.program import Program


def restore_run(config: RunConfig) -> tuple[Program, Tree, int]:
    """The program, the newest parameters in canonical shapes, in the shardings of `config`'s layout, and their step.

    Raises CheckpointError if there is no checkpoint, or it is of another model."""
    checkpointer = Checkpointer(config.run.directory / "checkpoints")
    step = checkpointer.latest_step()
    if step is None:
        raise CheckpointError(f"{checkpointer.directory} holds no checkpoint. Train first, with checkpoint.every > 0.")
    check_compatible(checkpointer.meta(step)["config"], config.model_dump(by_alias=True), checkpointer.directory)
    program = Program(config)
    return program, checkpointer.restore_params(step, program.abstract_canonical().params), step


def open_run(config: RunConfig) -> tuple[Program, Tree, int]:
    """As `restore_run`, with the parameters placed as the program's compiled functions take them."""
    program, params, step = restore_run(config)
    return program, program.place_params(params), step
