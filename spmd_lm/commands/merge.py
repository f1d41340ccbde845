"""`spmd-lm merge`: merges a run's adapters into its base, as a new run."""

import argparse
from pathlib import Path

from spmd_lm.commands.common import Arguments, add_fallback, load_configuration, write_result
from spmd_lm.runtime.devices import set_up_devices
from spmd_lm.runtime.directories import require_absent_or_empty


def run(arguments: Arguments) -> int:
    require_absent_or_empty(Path(arguments.OUT))
    config = set_up_devices(load_configuration(arguments, "RUN_DIR"))
    from spmd_lm.checkpoints.merge import merge_run

    result = merge_run(config, Path(arguments.OUT), arguments.fallback)
    text = f"{result['directory']}: {result['adapters']} adapters of step {result['step']} are merged"
    text += f"; logits move by at most {result['moved']:.1g} of the largest"
    return write_result(arguments, result, text)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_fallback(parser)
