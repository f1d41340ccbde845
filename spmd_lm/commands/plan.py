"""`spmd-lm plan`: what a run will be, before it runs and without its devices."""

from spmd_lm.commands.common import Arguments, Verb, load_configuration, write_result


def run(arguments: Arguments) -> int:
    config = load_configuration(arguments)
    from spmd_lm.planning.plan_report import describe, render

    result = describe(config)
    return write_result(arguments, result, render(result))


VERB = Verb("prints mesh, shardings and memory, and trains nothing", run)
