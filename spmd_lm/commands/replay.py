"""`spmd-lm replay`: runs a step of a run again from the checkpoint before it, and compares the bits."""

from spmd_lm.commands.common import Arguments, load_configuration, write_result
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.runtime.devices import set_up_devices
from spmd_lm.runtime.formatting import parse_count


def run(arguments: Arguments) -> int:
    if not (step := parse_count(arguments.STEP)):
        raise ConfigError(f"spmd-lm replay: '{arguments.STEP:.40}' is no step. Write `spmd-lm replay RUN 120`.")
    config = set_up_devices(load_configuration(arguments, "RUN_DIR"))
    from spmd_lm.training.replay import render, replay

    result = replay(config, step)
    write_result(arguments, result, render(result))
    return Exit.DONE if result["same"] else Exit.CHECK_FAILED
