"""`spmd-lm config`: prints the resolved configuration."""

from spmd_lm.commands.common import Arguments, Verb, load_configuration, write_result


def run(arguments: Arguments) -> int:
    config = load_configuration(arguments)
    from spmd_lm.config.load import dump

    return write_result(arguments, config.model_dump(by_alias=True), dump(config).rstrip())


VERB = Verb("prints the resolved YAML", run)
