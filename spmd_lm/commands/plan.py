"""`spmd-lm plan`: what a run will be, before it runs and without its devices."""

from spmd_lm.commands.common import Arguments, load_configuration, write_result


def run(arguments: Arguments) -> int:
    from spmd_lm.api import plan

    report = plan(load_configuration(arguments))
    return write_result(arguments, report, str(report))
