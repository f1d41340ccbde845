"""The command `spmd-lm VERB CONFIG [section.key=value ...]`: parsing, and nothing else."""

import argparse
import io
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from spmd_lm import __version__
from spmd_lm.commands.common import Arguments, write_text
from spmd_lm.commands.verbs import VERBS
from spmd_lm.errors import ConfigError, Exit, UserError
from spmd_lm.runtime.devices import hide_xla_warnings
from spmd_lm.runtime.signals import interruptible

PLACES = {
    "CONFIG": "a YAML file, or a run's directory",
    "RUN_DIR": "a run's directory",
    "DIR": "a Hugging Face directory: config.json, *.safetensors, tokenizer files",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command line."""
    argv = sys.argv[1:] if argv is None else argv
    hide_xla_warnings()
    if isinstance(sys.stdout, io.TextIOWrapper):  # text must not be lost to a terminal without letters for it
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with interruptible():
            name, arguments = parse(argv)
            return int(VERBS[name].run(arguments))
    except UserError as error:
        for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print(f"error: {problem}", file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)


def nearest(wrong: str, right: Iterable[str]) -> str | None:
    from spmd_lm.config.messages import did_you_mean

    return did_you_mean(wrong, right)


class Parser(argparse.ArgumentParser):
    """Options may stand anywhere; what is unknown is answered with what is near."""

    line: Sequence[str] = ()  # what is parsed

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}. {self.mending(message)}")

    def mending(self, message: str) -> str:
        known = self._option_string_actions
        for option, value in itertools.pairwise(self.line):
            if message == f"argument {option}: expected one argument" and value.startswith("-") and value not in known:
                return f"Write {option}={value}."
        unknown = message.removeprefix("unrecognized arguments: ")
        options = {option.strip("-"): option for option in known}
        if unknown != message:
            from spmd_lm.config.messages import did_you_mean, elsewhere

            word = unknown.split()[0].strip("-").replace("-", "_")
            key, near = elsewhere(word), did_you_mean(word, options)
            if key and (key.endswith(f".{word}") or not near):
                return f"Did you mean {key}=...?"
            if near:
                return f"Did you mean {options[near]}?"
        return f"See {self.prog} --help."

    def print_help(self, file: object = None) -> None:
        write_text(self.format_help().rstrip())


def parse(argv: Sequence[str]) -> tuple[str, Arguments]:
    """The verb and its arguments; exits after --help and --version."""
    if not argv or argv[0] in ("-h", "--help"):
        write_text(overview())
        raise SystemExit(0 if argv else int(Exit.CONFIG))
    if argv[0] == "--version":
        write_text(f"spmd-lm {__version__}")
        raise SystemExit(0)
    name, *rest = argv
    if name not in VERBS:
        near = nearest(name, VERBS)
        mending = f"Did you mean {near}?" if near else f"Verbs: {', '.join(VERBS)}."
        raise ConfigError(f"spmd-lm: no verb '{name}'. {mending}")

    places = VERBS[name].positionals
    usage = f"%(prog)s {' '.join(places)} [section.key=value ...] [OPTION ...]"
    parser = Parser(prog=f"spmd-lm {name}", usage=usage, description=VERBS[name].help, allow_abbrev=False)
    for place in places:
        parser.add_argument(place, nargs="?", metavar=place, help=PLACES[place])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to it; values are YAML")
    parser.add_argument("--devices", metavar="N", help="simulate N devices on the CPU; run.simulate_devices=N")
    parser.add_argument("--json", metavar="PATH", help="write the result as JSON; - for standard output")
    VERBS[name].add_options(parser)
    parser.line = rest
    arguments = parser.parse_intermixed_args(rest)
    for place in places:  # argparse alone would ask for the overrides as well
        given = getattr(arguments, place)
        if given is None or (len(places) > 1 and "=" in given and not os.path.exists(given)):
            parser.error(f"no {place} given: name {PLACES[place]}")
    return name, arguments


def overview() -> str:
    verbs = "\n".join(f"  {name:<10}{verb.help}" for name, verb in VERBS.items())
    usage = "usage: spmd-lm VERB CONFIG [section.key=value ...] [--devices N] [--json PATH|-]"
    return f"{usage}\n\n{verbs}\n\nspmd-lm VERB --help tells a verb's options."
