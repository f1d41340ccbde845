"""Conversations and completions as token ids with a mask of answers.

A conversation is tokenized once, as rendered by its template, so its ids equal those of Hugging Face's
apply_chat_template.  A token belongs to an answer if it begins in it."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from spmd_lm.config.data_sections import Instructions
from spmd_lm.data.instructions.chat_template import Rendered, Renderer, find_template
from spmd_lm.data.instructions.files import Completion, Conversation, read_instructions
from spmd_lm.data.tokenizers.tokenizer import Tokenizer, begin, check_ids, encode_markup
from spmd_lm.errors import ConfigError, DataError

Lines = Sequence[Completion | Conversation]

SLICE = 4096  # conversations held as text at a time


@dataclasses.dataclass(frozen=True)
class InstructionSplit:
    """N conversations of the training or the validation data, with K tokens in all."""

    tokens: np.ndarray  # unsigned [K]
    is_answer: np.ndarray  # bool [K]
    bounds: np.ndarray  # int64 [N + 1]: conversation n is tokens[bounds[n] : bounds[n + 1]]
    truncated: int  # conversations that lost their end
    dropped: int  # conversations left without an answer
    unanswered: int  # dropped ones that never had an answer
    resplit: int  # conversations whose text before the first answer has other tokens alone, as in generation

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def digest(self) -> bytes:
        """SHA-256 of the tokens, the bounds of conversations, and the answers."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.is_answer, self.bounds):
            digest.update(f"{array.dtype.str}:{array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.digest()


@dataclasses.dataclass(frozen=True)
class InstructionDataset:
    name: str
    tokenizer: Tokenizer
    context: int
    train: InstructionSplit
    validation: InstructionSplit | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"".join(split.digest() for split in self._splits)).hexdigest()

    @property
    def _splits(self) -> list[InstructionSplit]:
        return [split for split in (self.train, self.validation) if split]

    def describe(self) -> str:
        truncated, dropped = sum(s.truncated for s in self._splits), sum(s.dropped for s in self._splits)
        resplit = sum(s.resplit for s in self._splits)
        tokens, answers = sum(s.tokens.size for s in self._splits), sum(int(s.is_answer.sum()) for s in self._splits)
        return (
            f"{self.name}: {len(self.train):,} training conversations, "
            + (f"{len(self.validation):,} validation conversations, " if self.validation else "")
            + (f"{truncated:,} truncated to {self.context + 1:,} tokens, " if truncated else "")
            + (f"{dropped:,} dropped, with no answer in {self.context + 1:,} tokens, " if dropped else "")
            + (f"{resplit:,} whose answer follows other tokens than generate begins from, " if resplit else "")
            + f"{tokens:,} tokens, {answers:,} of them answers, sha256 {self.fingerprint[:12]}"
        )


def load_instructions(data: Instructions, tokenizer: Tokenizer, vocab_size: int, context: int) -> InstructionDataset:
    """Reads, renders and tokenizes both splits, for rows of `context` positions.  Raises DataError for missing or
    malformed files, for conversations that the chat template refuses and for a token id not below `vocab_size`;
    ConfigError for a tokenizer that lacks what the files need."""
    splits = []
    for key, paths in {"data.path": data.paths, "data.validation_path": data.validation_paths}.items():
        if paths:
            lines = read_instructions(paths, key)
            splits.append(_make_split(lines, data, tokenizer, vocab_size, context))
            if splits[-1].unanswered == len(lines):
                problem = "no line has an answer: a message with the role assistant, which the chat template writes"
                raise DataError(f"{key}={', '.join(paths)}: {problem}. Correct the files, or the template.")
            if splits[-1].dropped == len(lines):
                problem = f"no line has an answer in its first {context + 1:,} tokens"
                raise DataError(f"{key}={', '.join(paths)}: {problem}. Raise model.context, or name other files.")
    return InstructionDataset(f"instructions, {', '.join(data.paths)}", tokenizer, context, *splits)


def _make_split(
    lines: Lines, data: Instructions, tokenizer: Tokenizer, vocab_size: int, context: int
) -> InstructionSplit:
    """Truncates conversations to a row's positions and its last target."""
    ids, answers, truncated, dropped, unanswered, resplit = [], [], 0, 0, 0, 0
    for line, (ids_of_line, is_answer, is_resplit) in zip(lines, _tokenize(lines, data, tokenizer), strict=True):
        if tokenizer.vocab_size > vocab_size:
            check_ids(ids_of_line, vocab_size, line.location)
        fitting = slice(context + 1)
        if not is_answer[fitting][1:].any():  # the first token is no target
            dropped += 1
            unanswered += not is_answer.any()
            continue
        truncated += len(ids_of_line) > context + 1
        resplit += is_resplit
        ids.append(ids_of_line[fitting])
        answers.append(is_answer[fitting])
    return InstructionSplit(
        tokens=np.concatenate([tokenizer.encode(""), *ids]),
        is_answer=np.concatenate([np.zeros(0, bool), *answers]),
        bounds=np.cumsum([0, *map(len, ids)], dtype=np.int64),
        truncated=truncated,
        dropped=dropped,
        unanswered=unanswered,
        resplit=resplit,
    )


def _tokenize(lines: Lines, data: Instructions, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Token ids, answer mask and `resplit` of each line."""
    if any(isinstance(line, Completion) for line in lines) and tokenizer.eos_token_id is None:
        raise ConfigError(
            f"data.tokenizer={data.tokenizer}: it has no token that ends a text, with which a completion ends. Use "
            "another, or messages with a chat template."
        )
    texts = _render(lines, data, tokenizer)
    for start in range(0, len(lines), SLICE):
        some = lines[start : start + SLICE]
        rendered = [*itertools.islice(texts, len(some))]
        encoded = encode_markup(tokenizer, [each.text for each in rendered])
        before = encode_markup(tokenizer, [text[: answers[0][0]] if answers else "" for text, answers in rendered])
        for line, (_, answers), (ids, starts), (alone, _) in zip(some, rendered, encoded, before, strict=True):
            is_answer = np.zeros(len(ids), bool)
            for first, past in answers:
                is_answer |= (starts >= first) & (starts < past)
            resplit = bool(answers) and not np.array_equal(ids[starts < answers[0][0]], alone)
            row = _complete(ids, is_answer, tokenizer) if isinstance(line, Completion) else (ids, is_answer)
            yield *row, resplit


def _render(lines: Lines, data: Instructions, tokenizer: Tokenizer) -> Iterator[Rendered]:
    """Renders each line.  Only messages need a template."""
    conversations = [line for line in lines if isinstance(line, Conversation)]
    with contextlib.ExitStack() as stack:
        rendered: Iterator[Rendered] = iter(())
        if conversations:
            rendered = stack.enter_context(Renderer(find_template(data, tokenizer))).render(conversations)
        for line in lines:
            if isinstance(line, Completion):
                text = line.prompt + line.completion
                yield Rendered(text, [(len(line.prompt), len(text))])
            else:
                yield next(rendered)


def _complete(ids: np.ndarray, is_answer: np.ndarray, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Adds the first token, as `generate` does, and the token that ends a text, which belongs to the answer."""
    begun = begin(tokenizer, ids, prompt=True)
    is_answer = np.pad(is_answer, (len(begun) - len(ids), 0))
    if is_answer[-1:].any() and begun[-1] == tokenizer.eos_token_id:  # the completion spells it out
        return begun, is_answer
    return np.append(begun, np.array(tokenizer.eos_token_id, ids.dtype)), np.append(is_answer, True)
