"""The chat template of a tokenizer, and the process that renders conversations with it (`renderer`)."""

import dataclasses
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spmd_lm import files
from spmd_lm.config.data_sections import Data, Instructions
from spmd_lm.config.load import CHAT_TEMPLATE_FILE
from spmd_lm.data.instructions.files import Conversation
from spmd_lm.data.tokenizers import vocabulary
from spmd_lm.data.tokenizers.tokenizer import Tokenizer
from spmd_lm.errors import ConfigError, DataError

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

RENDERER_MEMORY = 2**30  # bytes of address space
RENDERER_SECONDS = 10  # CPU time per conversation; most take a millisecond
CHUNK = 64  # conversations sent at a time
MAX_RENDERED = 10_000_000  # characters of a rendered conversation

DATA_DATE = datetime.datetime(2024, 7, 26)
"""The date that strftime_now returns for training data, the same on every day: the default in Llama 3.1's template."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    path: Path  # its file, for messages
    sources: dict[str, str]  # `default`, and maybe `tool_use` for conversations with tools
    special_tokens: dict[str, str]  # by the names that templates use, such as bos_token


class Rendered(NamedTuple):
    """A conversation as a text, and the characters [start, end) of each of its answers."""

    text: str
    answers: list[tuple[int, int]]


def find_template(data: Data, tokenizer: Tokenizer) -> ChatTemplate:
    """data.chat_template, or else the tokenizer's own.  Raises ConfigError if there is none, or jinja2 is missing."""
    if not importlib.util.find_spec("jinja2"):
        raise ConfigError("chat templates: jinja2 is not installed. Install it: pip install 'spmd-lm[chat]'.")
    name, has_files = data.tokenizer, data.tokenizer != "bytes"
    if has_files and vocabulary.is_sentencepiece(name):
        reason = "a SentencePiece model reads no special token in a text, and chat templates spell them out"
        raise ConfigError(f"data.tokenizer={name}: {reason}. Use the tokenizer.json of the same model.")
    file = vocabulary.find_vocabulary(name) if has_files else None
    settings = vocabulary.read_settings(file) if file else {}
    path, sources = _find_sources(data, file and file.parent, settings)
    return ChatTemplate(path, sources, _special_tokens(settings, tokenizer))


def _find_sources(data: Data, directory: Path | None, settings: dict[str, Any]) -> tuple[Path, dict[str, str]]:
    named = isinstance(data, Instructions) and data.chat_template
    file = Path(named).expanduser() if named else directory and directory / CHAT_TEMPLATE_FILE
    if file and (named or os.path.lexists(file)):
        return file, {"default": _read_template(file)}
    given = settings.get("chat_template")
    several = given if isinstance(given, list) else [{"name": "default", "template": given}]
    named_sources = [(each.get("name"), each.get("template")) for each in several if isinstance(each, dict)]
    sources = {name: text for name, text in named_sources if isinstance(name, str) and isinstance(text, str)}
    if directory and "default" in sources:
        return directory / TOKENIZER_CONFIG, sources
    raise ConfigError(
        f"data.tokenizer={data.tokenizer} has no chat template, which makes a text of messages. Name one by "
        f"data.chat_template, or write {CHAT_TEMPLATE_FILE} beside its files."
    )


def _read_template(path: Path) -> str:
    try:
        return files.read_bytes(path, files.MAX_MODEL_FILE).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8. Write it again.") from None
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}. Mend that, or name another chat template."
        ) from None


def _special_tokens(settings: dict[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Special tokens from tokenizer_config.json, which overrides the tokenizer's own bos and eos tokens."""
    own = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    spelled = {name: tokenizer.decode([number]) for name, number in own.items() if number is not None}
    declared = {name: settings[name] for name in SPECIAL_TOKENS if name in settings}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in declared.items()}
    return {name: token for name, token in (spelled | texts).items() if isinstance(token, str)}


class Renderer:
    """A process that renders any number of conversations, and ends with the context.

    now: the template's clock.
    seconds: limit of CPU time for each conversation."""

    def __init__(self, template: ChatTemplate, now: datetime.datetime = DATA_DATE, seconds: int = RENDERER_SECONDS):
        self.template, self.seconds = template, seconds
        job = {"sources": template.sources, "variables": template.special_tokens, "now": now.isoformat()}
        self.job = job | {"most": MAX_RENDERED, "memory": RENDERER_MEMORY, "seconds": seconds}

    def __enter__(self) -> "Renderer":
        """Raises DataError for a template that does not compile."""
        command = [sys.executable, "-P", "-m", "spmd_lm.data.instructions.renderer"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=null, env=environment, start_new_session=True
        )
        try:
            self._send(self.job)
            self._receive("")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.kill()
        self.process.communicate()

    def render(self, conversations: Sequence[Conversation]) -> Iterator[Rendered]:
        """Renders each conversation, with its answers.  Raises DataError for one that the template refuses."""
        for start in range(0, len(conversations), CHUNK):
            chunk = conversations[start : start + CHUNK]
            self._send([(each.messages, each.tools, False) for each in chunk])
            for each in chunk:
                text, answers = self._receive(each.location)
                yield Rendered(text, [(first, past) for first, past in answers])

    def render_prompt(self, conversation: Conversation) -> str:
        """Renders a conversation up to where an answer begins."""
        self._send([(conversation.messages, conversation.tools, True)])
        return self._receive(conversation.location)

    def _send(self, message: Any) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # `_receive` reports its death
            pass

    def _receive(self, location: str) -> Any:
        """The next result.  Raises DataError, which begins with `location`, for an error or a dead process."""
        assert self.process.stdout
        try:
            answer = json.loads(self.process.stdout.readline())
        except json.JSONDecodeError:  # it ended within a line, or before the first
            code = self.process.wait()
            slow = f"it takes more than {self.seconds} s of a processor"
            died = f"it ends its process, which may have {RENDERER_MEMORY:,} bytes of memory"
            answer = {"error": slow if code == -signal.SIGXCPU else died}
        if "error" in answer:
            where = f"{location}: the chat template" if location else "the chat template"
            advice = "Correct the conversation, or the template" if location else "Correct it"
            raise DataError(f"{where} {self.template.path}: {answer['error']}. {advice}.")
        return answer["result"]
