"""Data sets of token ids on disk or in a bucket, from `spmd-lm prepare` or from Megatron-LM, alone or blended.

A prepared data set is a directory: manifest.json, the shards of its splits, and the vocabulary in tokenizer/, unless
its tokens are bytes.  Of one in a bucket, all but the .bin files of shards are copied to this machine."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spmd_lm.addresses import is_bucket
from spmd_lm.buckets.copies import Copies, copy_small_files, directory_of, origin_of
from spmd_lm.config.data_sections import RULES, Tokens
from spmd_lm.config.load import TOKENIZER_DIR, saved_tokenizer
from spmd_lm.data.token_files.bucket_tokens import BucketTokens
from spmd_lm.data.token_files.megatron import is_megatron, open_megatron, split_documents
from spmd_lm.data.token_files.shard import Header, Shard, TokenIds, damaged, map_tokens, open_shard, read_json
from spmd_lm.data.token_files.sharded_tokens import ShardedTokens
from spmd_lm.data.tokenizers.tokenizer import Tokenizer
from spmd_lm.data.tokenizers.vocabulary import vocabulary_hash
from spmd_lm.errors import ConfigError, DataError

MANIFEST = "manifest.json"
FORMAT, FORMAT_VERSION = "spmd_lm.tokens", 1
SAMPLES, SAMPLE = 64, 2048
READ_SPLITS = ("train", "validation")  # read by training


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
    """One data set."""

    path: str
    weight: float  # relative share of a blend's samples
    train: ShardedTokens
    validation: ShardedTokens
    documents: int
    identity: str  # hash of checksums, or of samples of files without checksums


@dataclasses.dataclass(frozen=True)
class TokenDataset:
    name: str
    corpora: list[TokenCorpus]
    tokenizer: Tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        identities = [(corpus.identity, corpus.weight) for corpus in self.corpora]
        return hashlib.sha256(json.dumps(identities).encode()).hexdigest()

    def describe(self) -> str:
        train, validation = (sum(getattr(each, split).size for each in self.corpora) for split in READ_SPLITS)
        documents = sum(corpus.documents for corpus in self.corpora)
        lacking = [corpus.path for corpus in self.corpora if not corpus.validation.size]
        held_out = f"{validation:,} validation tokens" + (f" (none of {', '.join(lacking)})" if lacking else "")
        return (
            f"{self.name}: {documents:,} documents, {train:,} training tokens, {held_out}, "
            f"sha256 {self.fingerprint[:12]}"
        )


def open_dataset(data: Tokens, tokenizer: Tokenizer, model_vocab: int, rules: int = RULES) -> TokenDataset:
    """Maps the files of data.path or data.blend after checking sizes and headers; hashes samples of Megatron-LM's.
    Raises DataError for files that are missing or damaged, ConfigError for another tokenizer's."""
    parts = [(part.path, part.weight) for part in data.blend] if data.blend else [(str(data.path), 1.0)]
    vocab_size = min(tokenizer.vocab_size, model_vocab)
    corpora = [_open_corpus(path, weight, data, tokenizer, vocab_size, rules) for path, weight in parts]
    return TokenDataset(", ".join(path for path, _ in parts), corpora, tokenizer)


def _directory(path: str) -> Path:
    """Where the files of a data set are, or of one in a bucket, the copies of small ones."""
    return directory_of(path) if is_bucket(path) else Path(path).expanduser()


def _copies(path: str) -> Copies | None:
    """Copies the small files of a data set in a bucket; None for one on disk."""
    if not is_bucket(path):
        return None
    copies = copy_small_files(path)
    if MANIFEST not in copies.objects:
        raise DataError(
            f"{path}: no {MANIFEST} there, so it is no prepared data set. Copy all of the directory there that "
            "`spmd-lm prepare` made. Megatron-LM's files are read on disk alone."
        )
    return copies


def _open_corpus(
    path: str, weight: float, data: Tokens, tokenizer: Tokenizer, vocab_size: int, rules: int
) -> TokenCorpus:
    root, copies = _directory(path), _copies(path)
    if copies is None and is_megatron(root):
        shard = open_megatron(root)
        splits = [[each] for each in split_documents(shard, data.validation_fraction, rules)]
        separator = _last_of_documents(shard, tokenizer.eos_token_id)
        identity = "" if rules < RULES else f"{splits[0][0].tokens.size} "
        identity += f"{data.validation_fraction} {shard.header.dtype} {_sample_hash(shard)}"
        documents = shard.header.documents
    else:
        manifest = read_manifest(root)
        _require_tokenizer(manifest, root, data)
        splits = [_open_shards(root, manifest, split, copies) for split in READ_SPLITS]
        separator = manifest["eos_token_id"]
        checksums = [[(s.header.idx_crc32, s.header.block_crc32) for s in shards] for shards in splits]
        identity = hashlib.sha256(json.dumps(checksums).encode()).hexdigest()
        documents = sum(shard.header.documents for shards in splits for shard in shards)
    verify = _verify(data, tokenizer, vocab_size)
    train, validation = (ShardedTokens(_nonempty(s), vocab_size, separator, verify) for s in splits)
    if not train.size:
        raise DataError(f"{path}: its training split has no tokens. Prepare more text, or leave it out of data.blend.")
    return TokenCorpus(path, weight, train, validation, documents, identity)


def _verify(data: Tokens, tokenizer: Tokenizer, vocab_size: int) -> Literal["touch", "full", "off"]:
    """data.verify, or `full` if the tokenizer may have produced ids that the model lacks."""
    return "full" if tokenizer.vocab_size > vocab_size else data.verify


def _open_shards(root: Path, manifest: dict[str, Any], split: str, copies: Copies | None) -> list[Shard]:
    def open_tokens(path: Path, header: Header) -> TokenIds:
        return BucketTokens(copies, path, header) if copies else map_tokens(path, header)

    shards = [open_shard(root / name, open_tokens) for name in manifest["splits"][split]["shards"]]
    for header in (shard.header for shard in shards):
        if (header.tokenizer, header.eos_token_id) != (manifest["tokenizer"], manifest["eos_token_id"]):
            raise damaged(root / MANIFEST, "its shards are of another tokenizer")
    return shards


def open_test_splits(data: Tokens, tokenizer: Tokenizer, model_vocab: int) -> list[ShardedTokens]:
    """The test splits of the data sets that have one.  Raises as `open_dataset` does, and DataError if none has."""
    vocab_size, opened = min(tokenizer.vocab_size, model_vocab), []
    paths = [part.path for part in data.blend or []] or [str(data.path)]
    for path in (path for path in paths if is_bucket(path) or not is_megatron(_directory(path))):
        root, copies = _directory(path), _copies(path)
        manifest = read_manifest(root)
        _require_tokenizer(manifest, root, data)
        if "test" in manifest["splits"]:
            shards = _nonempty(_open_shards(root, manifest, "test", copies))
            verify = _verify(data, tokenizer, vocab_size)
            opened.append(ShardedTokens(shards, vocab_size, manifest["eos_token_id"], verify))
    if not opened:
        raise DataError(
            f"test: no test split in {', '.join(paths)}. Prepare it with a share, as in "
            "split.test=0.01, or use validation."
        )
    return opened


def _sample_hash(shard: Shard) -> str:
    """Hash of the offsets and of SAMPLES evenly spaced samples of tokens, for files without checksums."""
    digest = hashlib.sha256(shard.offsets.tobytes())
    for start in np.linspace(0, max(0, shard.tokens.size - SAMPLE), SAMPLES).astype(np.int64).tolist():
        digest.update(shard.tokens[start : start + SAMPLE].tobytes())
    return digest.hexdigest()


def _nonempty(shards: list[Shard]) -> list[Shard]:
    return [shard for shard in shards if shard.tokens.size]


def _last_of_documents(shard: Shard, eos_token_id: int | None) -> int | None:
    """The end-of-sequence token, if the first document ends with it: Megatron-LM appends it to all, or to none."""
    first = shard.tokens[: int(shard.offsets[1])] if shard.header.documents else shard.tokens[:]
    return eos_token_id if first.size and first[-1] == eos_token_id else None


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest in `root`.  Raises DataError if it is missing, or not one that this version reads."""
    path = root / MANIFEST
    if not path.is_file():
        here = "" if root.is_absolute() else f" (working directory {Path.cwd()})"
        raise DataError(
            f"{root}: no prepared data set, which has a {MANIFEST}, and no {root.name}.idx beside it{here}. "
            "Prepare it with `spmd-lm prepare`, or give the path of Megatron-LM's files without their suffixes."
        )
    manifest = read_json(path)
    splits = manifest.get("splits")
    if manifest.get("format") != FORMAT or manifest.get("version") != FORMAT_VERSION or not isinstance(splits, dict):
        raise damaged(path, f"it is not the manifest of a data set in format {FORMAT}, version {FORMAT_VERSION}")
    for split in (*READ_SPLITS, *splits):
        value = splits.get(split)
        names = value.get("shards") if isinstance(value, dict) else None
        if not isinstance(names, list) or not all(_is_below(root, name) for name in names):
            raise damaged(path, f"its split {split!r} does not list shards in this directory")
    if not isinstance(manifest.get("tokenizer"), str) or not isinstance(manifest.get("eos_token_id"), int | None):
        raise damaged(path, "it does not say which tokenizer made its ids")
    return manifest


def _is_below(root: Path, name: Any) -> bool:
    try:
        return isinstance(name, str) and (root / name).resolve().is_relative_to(root.resolve())
    except ValueError:  # no file can have this name
        return False


def check_files(root: Path) -> None:
    """Raises DataError for a missing or damaged file of a prepared data set, without reading its tokens."""
    manifest = read_manifest(root)
    check_own_tokenizer(root, manifest)
    for split in manifest["splits"].values():
        for name in split["shards"]:
            open_shard(root / name)


def check_own_tokenizer(root: Path, manifest: dict[str, Any]) -> None:
    """Raises DataError unless the vocabulary beside the ids is the one that made them."""
    own = "bytes" if manifest["tokenizer"] == "bytes" else saved_tokenizer(root)
    if own is None:
        raise damaged(root / TOKENIZER_DIR, "its vocabulary is missing")
    if vocabulary_hash(str(own)) != manifest["tokenizer"]:
        raise damaged(root / TOKENIZER_DIR, "its vocabulary is not the one that made the token ids")


def _require_tokenizer(manifest: dict[str, Any], root: Path, data: Tokens) -> None:
    if vocabulary_hash(data.tokenizer) == manifest["tokenizer"]:
        return
    check_own_tokenizer(root, manifest)
    first = _directory(data.blend[0].path) if data.blend else root
    name = origin_of(root)
    if root != first and not is_megatron(first):  # its vocabulary is data.tokenizer, opened before
        own = first / TOKENIZER_DIR
        raise ConfigError(
            f"data.blend: {name} has another vocabulary than {origin_of(first)}, and corpora of one blend share "
            f"theirs. Prepare {name} again, with tokenizer={own if own.is_dir() else 'bytes'}."
        )
    raise ConfigError(
        f"data.tokenizer={data.tokenizer} is not the one that made the token ids in {name}. Leave it out: the data set "
        "has its own, which counts where no file of the run's configuration names another."
    )
