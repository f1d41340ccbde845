"""Turns texts into shards of tokens, in two parallel steps: each chunk's documents are tokenized, then assigned to
shards by their lengths."""

import functools
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib.format import open_memmap
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel

from spmd_lm.data.token_files.shard import Header, ShardWriter, open_shard, token_dtype
from spmd_lm.data.tokenizers.tokenizer import SubwordTokenizer, Tokenizer, begin, open_tokenizer, put_bos
from spmd_lm.errors import DataError
from spmd_lm.prepare.chunks import chunk_path, map_array, texts_of_chunk
from spmd_lm.prepare.duplicates import USED, CleanedChunks
from spmd_lm.prepare.splits import SPLITS, Part, Splits
from spmd_lm.prepare.stage_files import Natural, damaged_stage, open_array, read_stage, write_stage
from spmd_lm.runtime.outputs import writing

BATCH_BYTES = 2**20  # text tokenized at once; the library uses 60 to 160 bytes of memory for each byte
LIKELY_CUTS = re.compile(rb"[A-Za-z](?= [A-Za-z])")  # where most tokenizers split a text

KNOWN_CUTS = re.compile(
    rb"(?= [!-~\xc3-\xe0\xe4-\xf4])"  # before a space that begins a word, whatever its letters
    rb"|[!-~](?=\n)"
    rb"|(?:\xe3\x80[\x81\x82]|\xef\xbc\x8c)(?=[\xe5-\xe8\n])"  # after a Chinese comma or full stop
)
"""Places where GPT-2's and BERT's pre-tokenizers split.  GPT-2's is a regular expression that never looks back.  None
of its alternatives matches across such a place, and one that ends there would end there too if the text did: the last
space before a word begins a token; so does the first line feed after other characters, and a letter after punctuation
other than an apostrophe.  Bytes after a space that may be white space, as U+3000, are left out, and so are letters that
an older Unicode may not know."""

EXAMPLE = "It was one of TWO; AND SOME were naïve, others 1,234 of old.\nNo more of Them came then".encode()


class Vocabulary(NamedTuple):
    name: str  # `bytes`, or a path
    sha256: str  # hash of its file, or `bytes`
    vocab_size: int
    eos_token_id: int | None
    bos: Literal["auto"] | bool = "auto"  # Preparation.bos

    @property
    def tokenizer(self) -> tuple[str, str, Literal["auto"] | bool]:
        """Arguments of `load_tokenizer`."""
        return self.name, self.sha256, self.bos

    @property
    def eos_tokens(self) -> int:
        """End-of-sequence tokens per document."""
        return int(self.eos_token_id is not None)


class TokenizedChunk(NamedTuple):
    number: Natural
    documents: Natural  # with enough tokens; parts of a divided one count apart
    few_tokens: Natural  # documents with too few


@dataclass(frozen=True)
class ChunkTokenizer:
    """Tokenizes the USED documents of a chunk, or the parts of divided ones.

    00000.bin: their ids.
    00000.lengths.npy: uint64 [3, documents], their splits, counts of ids, and bytes of text.
    00000.json: a TokenizedChunk."""

    corpus: CleanedChunks
    labels: Path
    directory: Path
    vocabulary: Vocabulary
    min_tokens: int
    splits: Splits

    def __call__(self, number: int) -> TokenizedChunk:
        path = chunk_path(self.directory, number)
        if done := read_stage(path, TokenizedChunk, [".bin", ".lengths.npy"]):
            self._check(path, done)
            return done
        base, end = self.corpus.bases[number : number + 2].tolist()
        positions = np.flatnonzero(open_memmap(self.labels, mode="r")[base:end] == USED)
        data, lengths, few, tokenizer = io.BytesIO(), [], 0, load_tokenizer(*self.vocabulary.tokenizer)
        dtype = token_dtype(self.vocabulary.vocab_size)
        for _, group in itertools.groupby(self._encode(number, positions), lambda encoded: encoded[0].document):
            parts = [*group]
            if sum(len(ids) for _, ids in parts) < self.min_tokens:
                few += 1
                continue
            for part, ids in parts:
                ids = begin(tokenizer, ids, document=True)
                data.write(ids.astype(dtype).tobytes())
                lengths.append((part.split, len(ids), len(part.text)))
        done = TokenizedChunk(number, len(lengths), few)
        table = np.array(lengths, np.uint64).reshape(-1, 3).T
        write_stage(path, done, {".bin": data.getvalue(), ".lengths.npy": table})
        return done

    def _check(self, path: Path, done: TokenizedChunk) -> None:
        """Raises DataError if the lengths do not match the ids."""
        lengths = open_array(path.with_suffix(".lengths.npy"), np.uint64, 3, done.documents)
        ids = path.with_suffix(".bin").stat().st_size // token_dtype(self.vocabulary.vocab_size).itemsize
        if (lengths[1] > ids).any() or lengths[1].sum() != ids or (lengths[0] >= len(SPLITS)).any():
            raise damaged_stage(path.with_suffix(".lengths.npy"), f"its lengths are not those of {ids:,} ids")

    def _parts(self, number: int, positions: np.ndarray) -> Iterator[Part]:
        digests = map_array(self.corpus.directory, number, "digests")[positions, 0].tolist()
        texts = texts_of_chunk(self.corpus.directory, number, positions.tolist())
        for document, digest, text in zip(positions.tolist(), digests, texts, strict=True):
            yield from self.splits.divide(document, digest, text)

    def _encode(self, number: int, positions: np.ndarray) -> Iterator[tuple[Part, np.ndarray]]:
        """Yields the parts of the texts, and their ids."""
        tokenizer = load_tokenizer(*self.vocabulary.tokenizer)
        for batch in batches(self._parts(number, positions)):
            texts = [part.text for part in batch]
            if not isinstance(tokenizer, SubwordTokenizer):
                encoded = [tokenizer.encode(text) for text in texts]
            elif len(texts) == 1 and (cuts := cuts_of(tokenizer)):
                encoded = [np.concatenate([tokenizer.encode(each) for each in parts_of_document(texts[0], cuts)])]
            else:
                encoded = tokenizer.encode_batch(texts)
            yield from zip(batch, encoded, strict=True)


def parts_of_document(text: bytes, cuts: re.Pattern[bytes]) -> Iterator[bytes]:
    start = 0
    while len(text) - start > BATCH_BYTES and (found := cuts.search(text, start + BATCH_BYTES)):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


@functools.lru_cache(maxsize=8)
def cuts_of(tokenizer: SubwordTokenizer) -> re.Pattern[bytes] | None:
    """Pattern of places where a text can be cut without changing its ids: known from the pre-tokenizer, or inferred
    from an example.  None if there are none: Llama 2's tokenizer puts a space before each text."""
    backend = tokenizer.backend
    splitter, normalizer = backend.pre_tokenizer, backend.normalizer
    is_byte_level = isinstance(splitter, ByteLevel) and splitter.use_regex and not splitter.add_prefix_space
    is_bert = isinstance(splitter, BertPreTokenizer) and isinstance(normalizer, BertNormalizer)
    is_known = is_bert or (is_byte_level and normalizer is None)
    cuts = KNOWN_CUTS if is_known else LIKELY_CUTS
    added = backend.get_added_tokens_decoder().values()
    in_text = [token for token in added if not (token.special and backend.encode_special_tokens)]
    if any(token.lstrip or token.rstrip or cuts.search(token.content.encode()) for token in in_text):
        return None  # such tokens are found before the text is split
    return cuts if is_known or divides(tokenizer, EXAMPLE, cuts) else None


def divides(tokenizer: SubwordTokenizer, text: bytes, cuts: re.Pattern[bytes]) -> bool:
    """True if cutting the text at any match leaves its ids unchanged."""
    parts = [(text[: found.end()], text[found.end() :]) for found in cuts.finditer(text)]
    undivided = tokenizer.encode(text).tolist()
    return all([*tokenizer.encode(a).tolist(), *tokenizer.encode(b).tolist()] == undivided for a, b in parts)


def batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    batch, size = list[Part](), 0
    for part in parts:
        if batch and size + len(part.text) > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += len(part.text)
    if batch:
        yield batch


@functools.cache
def load_tokenizer(name: str, sha256: str, bos: Literal["auto"] | bool = "auto") -> Tokenizer:
    """The tokenizer, cached.  sha256: distinguishes vocabularies of the same name."""
    try:
        return put_bos(open_tokenizer(name), bos, key="bos")
    except DataError as error:
        raise DataError(str(error).replace("data.tokenizer=", "tokenizer=")) from None


class ShardPart(NamedTuple):
    """Documents start..stop-1 of a split's documents in a chunk."""

    chunk: int
    start: int
    stop: int


class PlannedShard(NamedTuple):
    split: str
    number: int
    parts: list[ShardPart]

    @property
    def name(self) -> str:
        return f"{self.split}/shard-{self.number:05}"


def plan_shards(directory: Path, chunks: int, split: str, shard_tokens: int, eos_tokens: int) -> Iterator[PlannedShard]:
    """Yields the shards of a split, each as full as whole documents make it."""
    number, parts, room = 0, list[ShardPart](), shard_tokens
    for chunk in range(chunks):
        lengths = map_array(directory, chunk, "lengths")
        sizes = lengths[1, lengths[0] == SPLITS.index(split)].astype(np.int64) + eos_tokens
        ends, start = np.cumsum(sizes), 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + room, "right"))
            if stop == start and not parts:
                stop += 1  # one document longer than a shard
            if stop > start:
                parts.append(ShardPart(chunk, start, stop))
                room -= int(ends[stop - 1]) - before
                start = stop
            if start < len(ends):
                yield PlannedShard(split, number, parts)
                number, parts, room = number + 1, [], shard_tokens
    if parts:
        yield PlannedShard(split, number, parts)


@dataclass(frozen=True)
class ShardMaker:
    """Writes planned shards below `out`, unless they exist."""

    out: Path
    directory: Path
    vocabulary: Vocabulary

    def __call__(self, shard: PlannedShard) -> dict[str, Any]:
        path = self.out / shard.name
        is_there = path.with_suffix(".json").exists()
        header = open_shard(path).header if is_there else self._write(path, shard)
        counts = {"tokens": header.tokens, "documents": header.documents, "text_bytes": header.text_bytes}
        return {"name": shard.name, "split": shard.split, **counts}

    def _write(self, path: Path, shard: PlannedShard) -> Header:
        sha256, vocab_size, eos = self.vocabulary.sha256, self.vocabulary.vocab_size, self.vocabulary.eos_token_id
        with writing(path):
            writer = ShardWriter(path, vocab_size, eos, sha256)
            try:
                for part in shard.parts:
                    for ids, text_bytes in self._documents(part, SPLITS.index(shard.split)):
                        writer.add(ids, text_bytes)
                return writer.finish()
            except BaseException:
                writer.abandon()
                raise

    def _documents(self, part: ShardPart, split: int) -> Iterator[tuple[np.ndarray, int]]:
        lengths = np.array(map_array(self.directory, part.chunk, "lengths")).astype(np.int64)
        ends = np.cumsum(lengths[1])
        dtype = token_dtype(self.vocabulary.vocab_size)
        path = chunk_path(self.directory, part.chunk).with_suffix(".bin")
        ids = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
        for place in np.flatnonzero(lengths[0] == split)[part.start : part.stop].tolist():
            yield ids[ends[place] - lengths[1, place] : ends[place]], int(lengths[2, place])
