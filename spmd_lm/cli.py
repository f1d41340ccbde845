"""The command line: `spmd-lm VERB CONFIG [section.key=value ...]`.  Parses it and runs the verb."""

import argparse
import io
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from spmd_lm import __version__
from spmd_lm.addresses import HUB_SCHEME, elsewhere, is_bucket
from spmd_lm.commands import (
    audit,
    bench,
    ckpt,
    config,
    evaluate,
    export_hf,
    generate,
    import_hf,
    merge,
    plan,
    preflight,
    prepare,
    quantize,
    replay,
    report,
    supervise,
    sweep,
    train,
)
from spmd_lm.commands.common import Arguments, write_text
from spmd_lm.errors import ConfigError, Exit, UserError
from spmd_lm.files import is_name
from spmd_lm.runtime.devices import hide_xla_warnings
from spmd_lm.runtime.outputs import flush_streams, open_closed_streams, print_line, quiet_libraries, unfailing
from spmd_lm.runtime.processes import PEER_IS_GONE, end_with_parent, in_a_job, is_peer_failure, leave_job
from spmd_lm.runtime.signals import interruptible


class Verb(NamedTuple):
    help: str
    run: Callable[[Arguments], int]  # returns the exit code
    add_options: Callable[[argparse.ArgumentParser], None] | None = None
    positionals: tuple[str, ...] = ("CONFIG",)  # before the overrides
    takes_config: bool = True  # and overrides, and --devices; otherwise the last positional may be repeated
    uses_devices: bool = True

    @property
    def runs_to_read(self) -> list[str]:
        """Positionals that are runs, or may be; the one that `import` makes is none yet."""
        first = self.positionals[:1] == ("RUN_DIR",)
        return [name for name in self.positionals if name in ("CONFIG", "RUN") or (name == "RUN_DIR" and first)]

    @property
    def usage(self) -> str:
        if not self.positionals:
            return "[OPTION ...] -- VERB ..."
        more = "[section.key=value ...]" if self.takes_config else f"[{self.positionals[-1]} ...]"
        return f"{' '.join(self.positionals)} {more} [OPTION ...]"


VERBS = {
    "train": Verb("trains, or resumes the run in run.dir", train.run, train.add_options),
    "eval": Verb(
        "metrics of a run's newest checkpoint on its validation data, or on zero-shot tasks",
        evaluate.run,
        evaluate.add_options,
    ),
    "generate": Verb("samples text from a run's newest checkpoint", generate.run, generate.add_options),
    "plan": Verb("prints mesh, shardings and memory, or searches for a layout", plan.run, plan.add_options),
    "audit": Verb("compiles the step and compares its collectives with theory", audit.run, audit.add_options),
    "preflight": Verb(
        "compiles the step for absent hardware: does it fit, how fast is it, what does the run cost?",
        preflight.run,
        preflight.add_options,
    ),
    "bench": Verb("times training steps: tokens/s, model FLOP/s, MFU, peak memory", bench.run, bench.add_options),
    "prepare": Verb(
        "raw documents to a data set of tokens, cleaned and split",
        prepare.run,
        positionals=("RECIPE",),
        uses_devices=False,
    ),
    "sweep": Verb("runs of a configuration whose keys vary, resumable", sweep.run, sweep.add_options, ("SWEEP",)),
    "ckpt": Verb(
        "what is in a run's checkpoints, and whether it is intact: ls RUN, verify RUN, diff RUN@STEP RUN@STEP",
        ckpt.run,
        ckpt.add_options,
        ("ACTION", "RUN"),
        takes_config=False,
    ),
    "supervise": Verb(
        "starts `train` again when it was preempted, hung, killed or lost a peer: supervise -- train CONFIG ...",
        supervise.run,
        supervise.add_options,
        (),
        takes_config=False,
    ),
    "replay": Verb("runs a step again: does it compute the same bits?", replay.run, positionals=("RUN_DIR", "STEP")),
    "report": Verb(
        "makes an HTML page of runs, laid over each other", report.run, report.add_options, ("RUN",), takes_config=False
    ),
    "import": Verb(
        "makes a run of a Hugging Face directory, or of hf://ORG/NAME[@REVISION]",
        import_hf.run,
        import_hf.add_options,
        ("DIR", "RUN_DIR"),
    ),
    "export": Verb("makes a Hugging Face directory of a run", export_hf.run, export_hf.add_options, ("RUN_DIR", "DIR")),
    "merge": Verb(
        "merges a run's adapters into its base, as a new run", merge.run, merge.add_options, ("RUN_DIR", "OUT")
    ),
    "quantize": Verb(
        "stores a run's matrices in few bits, as a new run", quantize.run, quantize.add_options, ("RUN_DIR", "OUT")
    ),
    "config": Verb("prints the resolved YAML", config.run),
}

READ_NO_CHECKPOINT = ("plan", "audit", "preflight", "bench", "report", "config", "train")  # train fetches it later

POSITIONALS = {
    "ACTION": "ls, verify or diff",
    "CONFIG": "a YAML file, a shipped one's name, as quickstart, or a run's directory",
    "RECIPE": "a data set's YAML file, or a shipped one's name, as prepare/python-stdlib",
    "SWEEP": "a sweep's YAML file, or a shipped one's name, as sweeps/layouts",
    "RUN_DIR": "a run's directory",
    "RUN": "a run's directory",
    "OUT": "the new run's directory",
    "STEP": "the step, from 1 on",
    "DIR": "a Hugging Face directory: config.json, *.safetensors, tokenizer files",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line, by default this process's own, and returns its exit code."""
    is_program = argv is None
    if is_program:
        set_up_process()
    argv = sys.argv[1:] if argv is None else argv
    end_with_parent()
    hide_xla_warnings()
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with interruptible():
            name, arguments = parse(argv)
            fetch_runs(name, arguments)
            return int(VERBS[name].run(arguments))
    except UserError as error:
        leave_if_peer_is_gone(error)
        for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print_line(f"error: {problem}", sys.stderr)
        return end_process(int(error.code), is_program)
    except KeyboardInterrupt:
        return end_process(int(Exit.INTERRUPTED), is_program)
    except Exception as error:
        leave_if_peer_is_gone(error)
        if in_a_job():
            traceback.print_exc()
            leave_job(1)
        raise
    finally:
        flush_streams()


def leave_if_peer_is_gone(error: Exception) -> None:
    """Reports an error that a lost process of the job caused, such as a failed save, as that loss, and exits."""
    if in_a_job() and is_peer_failure(error):
        print_line(f"error: {PEER_IS_GONE}", sys.stderr)
        leave_job(int(Exit.PEER_LOST))


def end_process(code: int, is_program: bool) -> int:
    """Ends the program with this exit code, not waiting for libraries' threads; in another program, returns it."""
    leave_job(code)
    if is_program:
        flush_streams()
        os._exit(code)
    return code


def set_up_process() -> None:
    """Sets up streams and libraries of our own program; another program that calls `main` keeps its own."""
    open_closed_streams()
    sys.stderr = unfailing(sys.stderr)  # libraries print to it too
    quiet_libraries()


class Parser(argparse.ArgumentParser):
    """Raises ConfigError with a suggestion instead of printing the usage and exiting."""

    arguments: Sequence[str] = ()  # being parsed

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}. {self.suggestion(message)}")

    def suggestion(self, message: str) -> str:
        """Advice on the error that argparse reports in `message`."""
        known = self._option_string_actions
        for option, value in itertools.pairwise(self.arguments):
            if message == f"argument {option}: expected one argument" and value.startswith("-") and value not in known:
                return f"Write {option}={value}."
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            from spmd_lm.config.suggest import did_you_mean, key_of_any_section

            options = {option.strip("-"): option for option in known}
            word = unknown.split()[0].strip("-").replace("-", "_")
            key, near = key_of_any_section(word), did_you_mean(word, options)
            if key and (key.endswith(f".{word}") or not near):
                return f"Did you mean {key}=...?"
            if near:
                return f"Did you mean {options[near]}?"
        return f"See {self.prog} --help."

    def paths_among(self, arguments: Arguments) -> Iterator[tuple[str, str]]:
        """Names and values of arguments that may be paths: all but free text, keys, topologies and choices."""
        for action in self._actions:
            given = getattr(arguments, action.dest, None)
            if action.dest in ("overrides", "topology") or action.metavar == "TEXT" or action.choices or not given:
                continue
            for text in given if isinstance(given, list) else [given]:
                if isinstance(text, str):
                    name = (action.option_strings or [action.dest])[0]
                    yield name, text.partition("=")[2] if action.metavar == "NAME[=PATH]" else text

    def print_help(self, file: object = None) -> None:
        write_text(self.format_help().rstrip())


def parse(argv: Sequence[str]) -> tuple[str, Arguments]:
    """The verb and its arguments.  Exits after --help and --version."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        verbs = "\n".join(f"  {name:<10}{verb.help}" for name, verb in VERBS.items())
        usage = "usage: spmd-lm VERB CONFIG [section.key=value ...] [--devices N] [--json PATH|-]"
        write_text(f"{usage}\n\n{verbs}\n\nspmd-lm VERB --help lists a verb's options.")
        raise SystemExit(0 if argv else int(Exit.CONFIG))
    if argv[0] == "--version":
        write_text(f"spmd-lm {__version__}")
        raise SystemExit(0)
    name, *rest = argv
    if name not in VERBS:
        from spmd_lm.config.suggest import did_you_mean

        near = did_you_mean(name, VERBS)
        suggestion = f"Did you mean {near}?" if near else f"Verbs: {', '.join(VERBS)}."
        raise ConfigError(f"spmd-lm: no verb '{name}'. {suggestion}")

    parser, positionals = make_parser(name), VERBS[name].positionals
    command: list[str] = []
    if name == "supervise" and "--" in rest:
        rest, command = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    parser.arguments = rest
    arguments = parser.parse_intermixed_args(rest)
    for positional in positionals:  # nargs="?" below: argparse would otherwise report missing overrides too
        given = getattr(arguments, positional)
        if not given or (len(positionals) > 1 and "=" in given and not os.path.exists(given)):
            parser.error(f"no {positional} given: name {POSITIONALS[positional]}")
    for name_of, path in parser.paths_among(arguments):
        if (name, name_of) == ("import", "DIR") and path.startswith(HUB_SCHEME):
            continue
        if name_of in VERBS[name].runs_to_read and is_bucket(path):
            continue
        if problem := elsewhere(path):
            raise ConfigError(f"{parser.prog}: {name_of} {path:.80}: {problem}.")
        if not is_name(path):
            parser.error(f"{path[:40]!r}..: no file can have this name")
    if name == "supervise":
        if not command or command[0] not in VERBS:
            raise ConfigError("spmd-lm supervise: no verb given. Write `spmd-lm supervise -- train CONFIG ...`.")
        arguments.command, arguments.supervised = command, parse(command)
    if getattr(arguments, "devices", None) is not None:
        arguments.overrides.append(f"run.simulate_devices={arguments.devices}")
    return name, arguments


def fetch_runs(verb: str, arguments: Arguments) -> None:
    """Replaces addresses of runs in buckets by their working copies on this machine."""
    if verb == "supervise":
        fetch_runs(*arguments.supervised)
    every = verb in ("ckpt", "replay") or getattr(arguments, "fallback", False)
    wanted: Any = "none" if verb in READ_NO_CHECKPOINT else "every" if every else "newest"

    def local(text: str) -> str:
        address, at = text, ""
        if verb == "ckpt" and (of_step := re.fullmatch(r"(.+)(@\d+)", text)):
            address, at = of_step.groups()
        if not is_bucket(address):
            return text
        from spmd_lm.checkpoints.bucket_run import fetch_run

        return f"{fetch_run(address, wanted)}{at}"

    for name in VERBS[verb].runs_to_read:
        given = getattr(arguments, name)
        setattr(arguments, name, [*map(local, given)] if isinstance(given, list) else local(given))


def make_parser(verb: str) -> Parser:
    usage = f"%(prog)s {VERBS[verb].usage}"
    parser = Parser(prog=f"spmd-lm {verb}", usage=usage, description=VERBS[verb].help, allow_abbrev=False)
    for positional in VERBS[verb].positionals:
        nargs = "?" if VERBS[verb].takes_config or positional == "ACTION" else "*"
        parser.add_argument(positional, nargs=nargs, metavar=positional, help=POSITIONALS[positional])
    if VERBS[verb].takes_config:
        parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changed keys; values are YAML")
    if VERBS[verb].takes_config and VERBS[verb].uses_devices:
        parser.add_argument("--devices", metavar="N", help="simulate N devices on the CPU; run.simulate_devices=N")
    parser.add_argument("--json", metavar="PATH", help="write the result as JSON; - for standard output")
    if add_options := VERBS[verb].add_options:
        add_options(parser)
    return parser
