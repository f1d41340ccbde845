"""`spmd-lm generate`: samples text from a run's newest checkpoint, or its answers in a conversation."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from spmd_lm.commands.common import Arguments, add_fallback, load_configuration, write_result
from spmd_lm.errors import ConfigError
from spmd_lm.generation.sampling import Sampling
from spmd_lm.runtime.devices import set_up_devices

if TYPE_CHECKING:
    from spmd_lm.config.schema import RunConfig
    from spmd_lm.parallel.trees import Tree
    from spmd_lm.step.program import Program


def run(arguments: Arguments) -> int:
    given = vars(arguments)
    sampling = Sampling(**{key.name: given[key.name] for key in fields(Sampling) if key.name in given})
    if arguments.chat and not arguments.prompt:
        raise ConfigError("--chat: the user says nothing. Add --prompt TEXT, once for each of the user's turns.")
    config, prompts = set_up_devices(load_configuration(arguments)), arguments.prompt or [""]
    answer: Callable[..., list[str]]
    if arguments.chat:
        from spmd_lm.generation.chat import chat_run

        answer = chat_run
    else:
        from spmd_lm.generation.generate import generate_run

        answer = generate_run
    pairs, blocks = list[dict[str, str]](), list[str]()
    for adapter in arguments.adapter or [None]:
        opened = _open(config, adapter, arguments.fallback)
        texts = answer(config, prompts, sampling, arguments.fallback, opened)
        own = {"adapter": adapter} if adapter else {}
        pairs += [own | {"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        blocks += [f"{adapter}:"] * (len(arguments.adapter or []) > 1) + texts
    return write_result(arguments, pairs, "\n\n".join(blocks))


def _open(config: "RunConfig", adapter: str | None, fallback: bool) -> "tuple[Program, Tree] | None":
    """The run with this adapter; None without one."""
    if adapter is None:
        return None
    from spmd_lm.huggingface.peft import open_adapter

    return open_adapter(config, Path(adapter), fallback)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="what to continue; may be repeated")
    help = "prompts are the user's turns of one conversation, by the run's chat template; prints the answers alone"
    help_adapter = "a directory of PEFT, or a run with adapters of this one; may be repeated"
    parser.add_argument("--adapter", action="append", metavar="DIR", help=help_adapter)
    parser.add_argument("--chat", action="store_true", help=help)
    add_fallback(parser)
    # Sampling holds the defaults; options that are not given stay unset.
    sampling = parser.add_argument_group("sampling", argument_default=argparse.SUPPRESS)
    for name, letter, help in (
        ("tokens", "N", "how many to add"),
        ("temperature", "X", "0 takes the likeliest token"),
        ("top_k", "N", "keep the N likeliest tokens; 0 keeps all"),
        ("top_p", "P", "keep the likeliest tokens that sum to P"),
        ("seed", "N", "of the sampling"),
    ):
        default = getattr(Sampling, name)
        option = f"--{name.replace('_', '-')}"
        sampling.add_argument(option, type=type(default), metavar=letter, help=f"{help} (default {default})")
    sampling.add_argument("--greedy", action="store_true", help="always take the likeliest token")
