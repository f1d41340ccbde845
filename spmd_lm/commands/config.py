"""`spmd-lm config`: prints the resolved configuration."""

from spmd_lm.commands.common import Arguments, load_configuration, write_result


def run(arguments: Arguments) -> int:
    from spmd_lm.config.load import dump

    config = load_configuration(arguments)
    return write_result(arguments, config.model_dump(by_alias=True), dump(config).rstrip())
