"""`spmd-lm replay`: runs a step of a run again from its checkpoint, and says whether it computes the same bits."""

from spmd_lm.commands.common import Arguments, load_configuration, write_result
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.runtime.devices import set_up_devices


def run(arguments: Arguments) -> int:
    if not arguments.STEP.isdecimal() or int(arguments.STEP) < 1:
        raise ConfigError(f"spmd-lm replay: '{arguments.STEP}' is no step. Write `spmd-lm replay RUN 120`.")
    config = set_up_devices(load_configuration(arguments, "RUN_DIR"))
    from spmd_lm.training.replay import render, replay

    result = replay(config, int(arguments.STEP))
    write_result(arguments, result, render(result))
    return Exit.DONE if result["same"] else Exit.CHECK_FAILED
