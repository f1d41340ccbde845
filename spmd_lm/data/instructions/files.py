"""Reads conversations, and prompts with their completions, from .jsonl files, one on each line:

{"prompt": "..", "completion": ".."}
{"messages": [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}], "tools": [..]}

Other keys of a line are ignored; those of a message, such as tool_calls, are passed to the chat template."""

from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, FailFast, Field, model_validator

from spmd_lm.data.tasks.files import load_json
from spmd_lm.data.text_files import read_documents
from spmd_lm.errors import DataError


class Completion(NamedTuple):
    """A prompt, and the text to learn."""

    location: str  # file and line, for messages
    prompt: str
    completion: str


class Conversation(NamedTuple):
    """Messages, and the tools offered to the model."""

    location: str
    messages: list[dict[str, Any]]  # without keys whose value is null
    tools: list[dict[str, Any]] | None = None


class Message(BaseModel, extra="allow"):
    role: str
    content: str | None = None  # null or absent only beside tool_calls

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and not (self.model_extra or {}).get("tool_calls"):
            raise ValueError("content: Field required")
        return self


class InstructionLine(BaseModel):
    """A line is {"prompt": "..", "completion": ".."}, or {"messages": [{"role": "..", "content": ".."}, ..]}, which may
    have `tools`."""

    prompt: str | None = None
    completion: str | None = None
    messages: Annotated[list[Message] | None, FailFast(), Field(min_length=1)] = None
    tools: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _one_of_two_forms(self) -> "InstructionLine":
        if (self.prompt is None) != (self.completion is None):
            raise ValueError(f"{'prompt' if self.prompt is None else 'completion'}: Field required")
        if (self.prompt is None) == (self.messages is None):
            have = "both prompt and messages" if self.messages else "neither prompt and completion nor messages"
            raise ValueError(f"it has {have}")
        return self


def read_instructions(patterns: list[str], key: str) -> list[Completion | Conversation]:
    """Conversations in files, globs and directories, in order.  Raises DataError for missing, unreadable or malformed
    files.  key: the configuration key that holds `patterns`."""
    read: list[Completion | Conversation] = []
    for document in read_documents(patterns, key, (".jsonl",)):
        for location, line in load_json(InstructionLine, document, by_line=True):
            if line.messages is None:
                assert line.prompt is not None and line.completion is not None
                read.append(Completion(location, line.prompt, line.completion))
            else:
                messages = [message.model_dump(exclude_none=True) for message in line.messages]
                read.append(Conversation(location, messages, line.tools))
    if not read:
        raise DataError(f"{key}={', '.join(patterns)}: no conversation. Name files that have some.")
    return read
