"""A program that renders conversations with a chat template, within bounds of memory and time.

A template is a program that comes with a model: it may loop forever, fill the memory, or try to leave its sandbox.  So
it runs in a process that writes no file and that the system ends at its limits.

Standard input has a line with a job, then lines with lists of conversations; standard output gets a line for the job,
once the template is compiled, and one for each conversation.  All lines are JSON; `chat_template` is the other end."""

import json
import math
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spmd_lm.data.tokenizers.trial import limit

QUOTED = 40  # characters of a text that a message quotes


class Refusal(Exception):
    """The fault of a template, or of a conversation with it: a sentence without its period."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Raises for every unsafe attribute, even an unused one."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"it asks for {attribute!r} of a {type(obj).__name__}, which no template may have")


class GenerationBlocks(Extension):
    """{% generation %}..{% endgeneration %} blocks, which mark the text that a model writes."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)
    blocks: list[str]  # the text so far
    marked: list[tuple[int, str]]  # first character and text of each such block

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.marked.append((sum(map(len, self.blocks)), text))
        return text


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    """Like jinja2's filter, but without its HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class Templates:
    """Compiled templates of a job: `default`, and maybe `tool_use` for conversations with tools.

    variables: special tokens by name, such as bos_token.
    now: the time that strftime_now formats, in ISO 8601.
    most: maximum characters of a text."""

    def __init__(self, sources: dict[str, str], variables: dict[str, str], now: str, most: int):
        self.sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols])
        self.sandbox.filters["tojson"] = to_json
        helpers: dict[str, Any] = {
            "raise_exception": raise_exception,
            "strftime_now": datetime.fromisoformat(now).strftime,
        }
        self.sandbox.globals |= helpers
        self.variables, self.most = variables, most
        self.generation = cast(GenerationBlocks, self.sandbox.extensions[GenerationBlocks.identifier])
        self.compiled = {name: self.sandbox.from_string(source) for name, source in sources.items()}

    def render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str:
        """The text of these messages; with `prompt`, up to where an answer begins."""
        template = self.compiled["tool_use" if tools and "tool_use" in self.compiled else "default"]
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        context = template.new_context(self.variables | given)
        self.generation.blocks, self.generation.marked = blocks, marked = list[str](), list[tuple[int, str]]()
        length = 0
        for block in template.root_render_func(context):
            blocks.append(block)
            length += len(block)
            if length > self.most:
                raise Refusal(f"it makes a text of more than {self.most:,} characters")
        text = "".join(blocks)
        if not all(text.startswith(part, start) for start, part in marked):
            raise Refusal(
                "it has {% generation %} inside of a macro or a set block, whose place in the text is not known"
            )
        return text

    def answers(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the character ranges of its answers.  Raises Refusal if they are
        uncertain."""
        text = self.render(messages, tools, prompt=False)
        if spans := [(start, start + len(part)) for start, part in self.generation.marked]:
            return text, spans
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:i], tools, prompt=True)
                after = self.render(messages[: i + 1], tools, prompt=False)
                require_prefix(before, after, f"the prompt of messages[{i}]")
                require_prefix(after, text, f"the text up to messages[{i}]")
                spans.append((len(before), len(before) + len(answer_of(after[len(before) :], message))))
        return text, spans


def answer_of(written: str, message: dict[str, Any]) -> str:
    """An answer as written, without white space after the token that ends the turn."""
    answer, content = written.rstrip(), str(message.get("content", "")).strip()
    return written if content and answer.endswith(content) else answer  # white space ends the turn, or nothing does


def require_prefix(first: str, longer: str, what: str) -> None:
    """Raises Refusal unless the longer text begins with the first."""
    if longer.startswith(first):
        return
    at = next((i for i, (a, b) in enumerate(zip(first, longer, strict=False)) if a != b), len(longer))
    start = max(0, at - QUOTED // 2)
    quoted = (repr(text[start : start + QUOTED]) for text in (first, longer))
    raise Refusal(
        f"it writes {what} as {next(quoted)} and, once more follows, as {next(quoted)} (from character {start} on), so "
        "that no answer has a certain place. Put answers between {% generation %} and {% endgeneration %} in a copy of "
        "it that data.chat_template names, or leave one answer in each conversation"
    )


def outcome(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """{"result": ..}, or {"error": ..} with the template's fault."""
    try:
        return {"result": function(*arguments)}
    except Refusal as refusal:
        return {"error": str(refusal)}
    except MemoryError:
        return {"error": "it takes more memory than it may have"}
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except TemplateError as error:
        return {"error": f"it says: {error.message}"}
    except Exception as error:  # whatever a template may do wrong
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # meant for the run; this process ends with its input
        signal.signal(number, signal.SIG_IGN)
    job = json.loads(sys.stdin.readline())
    for which, most in {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_AS": job.pop("memory")}.items():
        limit(getattr(resource, which), most)
    seconds, made = job.pop("seconds"), []

    def send(message: dict[str, Any]) -> None:
        if "error" in message:
            message["error"] = " ".join(message["error"].split())[:600]
        print(json.dumps(message), flush=True)

    def compile_templates() -> None:
        made.append(Templates(**job))

    limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
    send(outcome(compile_templates))
    for line in sys.stdin:
        for messages, tools, prompt in json.loads(line):
            limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
            call = (made[0].render, messages, tools, True) if prompt else (made[0].answers, messages, tools)
            send(outcome(*call))


if __name__ == "__main__":
    main()
