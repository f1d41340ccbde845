"""`prepare`, from its configuration to the manifest, in four stages that each resume from finished work.

  read         documents, cleaned one by one, in chunks with the keys of their duplicates       OUT.partial/read
  duplicates   a label for each document                                                        OUT.partial/fates.npy
  tokenize     the chunks' ids, by a given tokenizer or one that is trained first               OUT.partial/tokens
  shards       the same ids, divided into shards of each split                                  OUT/SPLIT/shard-00000

Data and manifest do not depend on the number of workers or on interruptions."""

import functools
import itertools
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from spmd_lm import __version__
from spmd_lm.config.data_sections import RULES
from spmd_lm.config.load import TOKENIZER_DIR
from spmd_lm.data.token_files.dataset import FORMAT, FORMAT_VERSION, READ_SPLITS
from spmd_lm.data.tokenizers.vocabulary import copy_vocabulary, vocabulary_hash
from spmd_lm.errors import DataError
from spmd_lm.prepare import clean, duplicates, tokens
from spmd_lm.prepare.chunks import MOST_TOLD, ChunkCleaner, ChunkRecord, NothingLeftError, divide, finished_chunk
from spmd_lm.prepare.report import Stages, explain_nothing_left, find_warnings, make_steps
from spmd_lm.prepare.schema import Preparation, TrainedTokenizer
from spmd_lm.prepare.sources import SourceReader, open_evaluation_texts, open_sources
from spmd_lm.prepare.splits import SPLITS, Splits, split_corpus
from spmd_lm.prepare.stage_files import Natural, damaged_stage, open_array, read_stage, write_stage
from spmd_lm.prepare.tokens import TokenizedChunk, Vocabulary
from spmd_lm.prepare.workers import Workers
from spmd_lm.prepare.workspace import Workspace
from spmd_lm.runtime.directories import lock_directory
from spmd_lm.runtime.outputs import writing

LIBRARIES = ("numpy", "tokenizers")  # their versions may affect the data


@dataclass
class ReadStage:
    chunks: Natural
    sources: list[dict[str, Any]]


def prepare(config: Preparation, log: Callable[[str], None]) -> dict[str, Any]:
    """Makes the data set, or the parts of it that are not finished; returns a report: the manifest, and more.  Raises
    ConfigError, DataError and OutputError.  log: prints lines of progress."""
    clean.check_steps(config.steps)
    evaluation = open_evaluation_texts(config)
    workspace, identity = Workspace(config.directory), identify(config, evaluation)
    if manifest := workspace.finished(identity):
        return {"out": str(workspace.out), "finished_before": True, **manifest}
    readers = open_sources(config, (workspace.out, workspace.partial))
    with lock_directory(workspace.partial, log, True, key="out"):
        workspace.begin(identity)
        try:
            leaks = index_leaks(config, workspace, evaluation)
            with Workers(config.processes) as workers, Stages(log) as stages:
                cleaner = ChunkCleaner(config, workspace.read, leaks)
                records, sources = read_documents(cleaner, workspace, readers, workers, stages)
                made, steps = make_splits(config, workspace, records, workers, stages)
        except NothingLeftError:
            workspace.discard()
            raise
        manifest = made | {
            "steps": steps,
            "sources": sources,
            "config": identity["config"],
            "sha256": identity["sha256"],
            "versions": identity["versions"],
        }
        notes = {
            "bad": first_bad(records),
            "not_read": [reader.record_unread() for reader in readers if reader.unread],
            "warnings": find_warnings(config, records, sources, manifest["splits"]),
        }
        report = {"steps": steps, **notes, "seconds": stages.seconds, "workers": config.processes}
        workspace.finish(manifest, report)
    return {"out": str(workspace.out), "finished_before": False, **manifest, **notes}


def make_splits(
    config: Preparation, workspace: Workspace, records: list[ChunkRecord], workers: Workers, stages: Stages
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Makes shards of the cleaned documents; returns the manifest's entries about tokens, and the steps."""
    corpus = duplicates.CleanedChunks.of(workspace.read, records)
    labels = find_duplicates(config, workspace, corpus, workers, stages)
    if not (labels == duplicates.USED).any():
        raise NothingLeftError(explain_nothing_left(make_steps(config, records, labels, []), first_bad(records)))
    splits = split_corpus(corpus, labels, config.split)
    vocabulary = make_vocabulary(config, workspace, corpus, labels, splits, stages)
    tokenized = tokenize(config, workspace, corpus, splits, vocabulary, workers, stages)
    steps = make_steps(config, records, labels, tokenized)
    if not any(chunk.documents for chunk in tokenized):
        raise NothingLeftError(explain_nothing_left(steps, first_bad(records)))
    made = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "vocab_size": vocabulary.vocab_size,
        "eos_token_id": vocabulary.eos_token_id,
        "tokenizer": vocabulary.sha256,
        "splits": write_shards(config, workspace, len(tokenized), vocabulary, workers, stages),
    }
    return made, steps


def first_bad(records: list[ChunkRecord]) -> list[str]:
    return [each for record in records for each in record.bad][:MOST_TOLD]


def identify(config: Preparation, evaluation: list[SourceReader]) -> dict[str, Any]:
    """Everything that determines the data, besides the sources' files."""
    given, leaks, sha256 = config.tokenizer, config.steps.leaks, dict[str, Any]()
    if leaks and leaks.titles:
        sha256["steps.leaks.titles"] = clean.read_titles(leaks.titles)[1]
    if evaluation:
        sha256["steps.leaks.files"] = [reader.read_through()["sha256"] for reader in evaluation]
    versions = {name: metadata.version(name) for name in LIBRARIES} | {"rules": str(RULES)}
    if config.steps.utf8 == "repair":
        versions["ftfy"] = metadata.version("ftfy")
    return {
        "config": json.loads(json.dumps(config.identity())),
        "sha256": sha256,
        "versions": {"spmd_lm": __version__, "python": platform.python_version(), **versions},
        "tokenizer": vocabulary_sha256(given) if isinstance(given, str) else None,
    }


def vocabulary_sha256(name: str) -> str:
    try:
        return vocabulary_hash(name)
    except DataError as error:
        raise DataError(str(error).replace("data.tokenizer=", "tokenizer=")) from None


def read_documents(
    cleaner: ChunkCleaner, workspace: Workspace, readers: list[SourceReader], workers: Workers, stages: Stages
) -> tuple[list[ChunkRecord], list[dict[str, Any]]]:
    """Records of the chunks and of the sources."""
    if done := read_stage(workspace.read, ReadStage):
        if len(done.sources) != len(readers):
            raise damaged_stage(workspace.read.with_suffix(".json"), f"it is of {len(done.sources):,} sources")
        present = min(done.chunks, sum(1 for _ in workspace.read.glob("*.json")))
        found = [*workers.map(functools.partial(finished_chunk, workspace.read), range(present))]
        records = [record for record in found if record]
        if gone := done.chunks - len(records):
            raise DataError(
                f"{workspace.partial}: {gone:,} of its {done.chunks:,} chunks are gone. Remove it and {workspace.out}, "
                "and start again."
            )
        bad = [each for record in records for each in record.bad]
        if bad and cleaner.config.on_bad == "error":
            raise DataError(f"{bad[0]}. Mend it, leave it out, or set on_bad=skip.")
        return records, done.sources
    sizes = [reader.size for reader in readers]
    size = None if None in sizes else sum(filter(None, sizes))
    records = list[ChunkRecord]()
    with stages.stage("read", size) as advance:
        raw = itertools.chain.from_iterable(reader.documents() for reader in readers)
        for record in workers.map(cleaner, divide(raw)):
            records.append(record)
            advance(sum(reader.bytes_read for reader in readers))
    if not any(record.raw_documents for record in records):
        raise NothingLeftError(f"sources: no document in {', '.join(reader.source.label for reader in readers)}.")
    sources = [reader.record() for reader in readers]
    write_stage(workspace.read, {"chunks": len(records), "sources": sources}, {})  # a ReadStage
    return records, sources


def index_leaks(config: Preparation, workspace: Workspace, readers: list[SourceReader]) -> Path | None:
    """The file of n-grams in the evaluation texts, if any, as they were when the data set was begun."""
    path, leaks = workspace.partial / "leaks", config.steps.leaks
    if leaks is None or not readers:
        return None
    if not read_stage(path, str, [".npy"]):
        documents = itertools.chain.from_iterable(reader.documents() for reader in readers)
        write_stage(path, "n-grams", {".npy": clean.leak_hashes(documents, leaks.ngram)})
    open_array(path.with_suffix(".npy"), np.uint64, None)
    return path.with_suffix(".npy")


def find_duplicates(
    config: Preparation, workspace: Workspace, corpus: duplicates.CleanedChunks, workers: Workers, stages: Stages
) -> np.ndarray:
    """Labels of documents, uint8 [documents]."""
    path, near = workspace.partial / "fates", config.steps.near_duplicates
    if not read_stage(path, str, [".npy"]):
        labels = np.zeros(corpus.documents, np.uint8)
        with stages.stage("duplicates", None):
            if config.steps.exact_duplicates:
                duplicates.mark_exact(corpus, labels)
            if near:
                duplicates.mark_near(corpus, labels, near.jaccard, workers)
        write_stage(path, "fates", {".npy": labels})
    return open_array(path.with_suffix(".npy"), np.uint8, corpus.documents)


def make_vocabulary(
    config: Preparation,
    workspace: Workspace,
    corpus: duplicates.CleanedChunks,
    labels: np.ndarray,
    splits: Splits,
    stages: Stages,
) -> Vocabulary:
    """The tokenizer, trained if requested, with a copy in OUT."""
    name = config.tokenizer
    directory = workspace.out / TOKENIZER_DIR
    if isinstance(name, TrainedTokenizer):
        from spmd_lm.prepare.trained_tokenizer import train_tokenizer

        record, trained = workspace.partial / "tokenizer", directory / "tokenizer.json"
        sha256 = read_stage(record, str)
        if not sha256 or not trained.exists():
            with stages.stage("train tokenizer", None), writing(trained):
                train_tokenizer(name, corpus, labels, splits, directory)
            write_stage(record, vocabulary_sha256(str(trained)), {})
        elif vocabulary_sha256(str(trained)) != sha256:
            raise damaged_stage(record.with_suffix(".json"), f"{trained} is another tokenizer than was trained")
        name = str(directory)
    elif name != "bytes":
        with writing(directory):
            copy_vocabulary(name, directory)
    sha256 = vocabulary_sha256(name)
    tokenizer = tokens.load_tokenizer(name, sha256, config.bos)
    return Vocabulary(name, sha256, tokenizer.vocab_size, tokenizer.eos_token_id, config.bos)


def tokenize(
    config: Preparation,
    workspace: Workspace,
    corpus: duplicates.CleanedChunks,
    splits: Splits,
    vocabulary: Vocabulary,
    workers: Workers,
    stages: Stages,
) -> list[TokenizedChunk]:
    labels = workspace.partial / "fates.npy"
    tokenizer = tokens.ChunkTokenizer(corpus, labels, workspace.tokens, vocabulary, config.steps.min_tokens, splits)
    chunks, done = len(corpus.bases) - 1, []
    with stages.stage("tokenize", chunks) as advance:
        for chunk in workers.map(tokenizer, range(chunks)):
            done.append(chunk)
            advance(len(done))
    return done


def write_shards(
    config: Preparation, workspace: Workspace, chunks: int, vocabulary: Vocabulary, workers: Workers, stages: Stages
) -> dict[str, Any]:
    """The manifest's `splits`: all that have a share or that training reads."""
    shares = {"train": 1.0, "validation": config.split.validation, "test": config.split.test}
    maker = tokens.ShardMaker(workspace.out, workspace.tokens, vocabulary)
    splits = {}
    for split in [name for name in SPLITS if shares[name] or name in READ_SPLITS]:
        with writing(workspace.out / split / "shard"):
            os.makedirs(workspace.out / split, exist_ok=True)
        planned = [*tokens.plan_shards(workspace.tokens, chunks, split, config.shard_tokens, vocabulary.eos_tokens)]
        headers = []
        with stages.stage(f"{split} shards", len(planned)) as advance:
            for header in workers.map(maker, planned):
                headers.append(header)
                advance(len(headers))
        counts = {key: sum(each[key] for each in headers) for key in ("tokens", "documents", "text_bytes")}
        splits[split] = {"shards": [each["name"] for each in headers], **counts}
    return splits
