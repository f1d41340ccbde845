"""The files of a vocabulary: where to find them, how to load them, and the copy that a run keeps.

data.tokenizer is the path of one of these files, or of a directory that has one, searched for in this order:
  tokenizer.json   as Hugging Face writes it
  vocab.txt        BERT's WordPiece, one token per line
  vocab.json       GPT-2's byte-level BPE, with its merges.txt beside it
  tokenizer.model  SentencePiece's, as in T5 or Llama
A tokenizer_config.json beside a vocab.txt may set do_lower_case, strip_accents and tokenize_chinese_chars; beside a
vocab.json, add_prefix_space."""

import functools
import hashlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from spmd_lm import files
from spmd_lm.config.load import CHAT_TEMPLATE_FILE, TOKENIZER_DIR, VOCABULARY_FILES, saved_tokenizer
from spmd_lm.data.tokenizers import trial
from spmd_lm.errors import DataError, UserError

# Files copied unchanged along with a vocabulary.
COMPANION_FILES: tuple[str, ...] = ("tokenizer_config.json", "merges.txt", "special_tokens_map.json")
COMPANION_FILES += ("added_tokens.json", "generation_config.json", CHAT_TEMPLATE_FILE)

CONFIG_JSON = "config.json"  # a model's, with the ids that end a text; export writes its own

# Settings read from a tokenizer_config.json.
SETTINGS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space", "add_bos_token")
MAY_BE_NULL = ("strip_accents", "add_bos_token")

# The first one in a vocabulary is used.
EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
BOS_TOKENS = ("<s>", "<|begin_of_text|>", "<bos>", *EOS_TOKENS)

# Tokens of masked rows, in the order of `SpecialTokens`.
BERT_TOKENS = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
ROBERTA_TOKENS = ("<s>", "</s>", "<mask>", "<pad>")


def put_by_name(tokens: Collection[str]) -> set[str]:
    """Tokens that rows may contain though no text does: tokens that begin and end texts, and the special tokens of
    masked rows, if the vocabulary has a complete set."""
    rows = (row for row in (BERT_TOKENS, ROBERTA_TOKENS) if all(token in tokens for token in row))
    return {token for token in (*BOS_TOKENS, *itertools.chain(*rows)) if token in tokens}


MAX_TOKENS = 2**20  # the largest vocabulary in use has 0.9 million


def find_vocabulary(name: str) -> Path:
    """The vocabulary file that data.tokenizer=name refers to.  Raises DataError if there is none, or if a file that
    belongs to it links out of its directory, which the run's copy and an export would publish."""
    vocabulary = _find_file(name)
    for path in _standard_files(name, vocabulary):  # a file that was named itself may be a link
        _require_inside(path)
    return vocabulary


def _require_inside(path: Path) -> None:
    try:
        files.require_inside(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}.") from None


def _find_file(name: str) -> Path:
    where = f"data.tokenizer={name}"
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise DataError(f"{where}: there is no such home directory. Write the path in full.") from None
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        missing = f"no such file or directory (working directory {Path.cwd()})"
        problem, kinds = "not a regular file" if os.path.exists(path) else missing, ", a ".join(VOCABULARY_FILES)
        raise DataError(f"{where}: {problem}. Give the path of a {kinds}, or of their directory, or `bytes`.")
    for file in VOCABULARY_FILES:
        if os.path.isfile(path / file):
            return path / file
    way = f"Did you mean {path / TOKENIZER_DIR}?" if saved_tokenizer(path) else "Name one that has, or `bytes`."
    raise DataError(f"{where}: this directory has no {', '.join(VOCABULARY_FILES)}. {way}")


def vocabulary_hash(name: str) -> str:
    """SHA-256, in hex, of the vocabulary file that data.tokenizer=name refers to; `bytes` has none."""
    return name if name == "bytes" else hashlib.sha256(_read_bytes(find_vocabulary(name))).hexdigest()


def copy_vocabulary(name: str, directory: Path, with_model: bool = False) -> None:
    """Copies the files that data.tokenizer=name refers to into `directory`, under the standard names.  The vocabulary,
    which must be valid, comes last: it exists only once the copy is complete.
    with_model: also copies the config.json of a model in the directory `name`, which lists the ids that end a text."""
    vocabulary = find_vocabulary(name)
    copied = {path.name: path for path in _standard_files(name, vocabulary)}
    model = Path(name).expanduser() / CONFIG_JSON
    if with_model and os.path.isfile(model):
        _require_inside(model)
        copied = {CONFIG_JSON: model, **copied}
    if os.path.isfile(Path(name).expanduser()):
        copied[_standard_name(vocabulary)] = vocabulary
    _make_directory(directory)
    for file, path in copied.items():
        files.write_atomically(directory / file, _read_bytes(path))


def copy_chat_template(name: str, directory: Path) -> None:
    """Copies the file of data.chat_template=name into `directory`, under the standard name."""
    text = _read_bytes(Path(name).expanduser())
    _make_directory(directory)
    files.write_atomically(directory / CHAT_TEMPLATE_FILE, text)


def write_vocabulary(tokenizer_json: str, directory: Path) -> None:
    _make_directory(directory)
    files.write_atomically(directory / "tokenizer.json", tokenizer_json)


def _make_directory(directory: Path) -> None:
    if directory.is_symlink():
        raise DataError(f"{directory}: it is a link, and may lead anywhere: remove it, or put a vocabulary there.")
    directory.mkdir(exist_ok=True)


def _standard_files(name: str, vocabulary: Path) -> list[Path]:
    """The existing files with standard names that belong to data.tokenizer=name: vocabularies only if `name` is a
    directory, and then last."""
    names = (*COMPANION_FILES, *(VOCABULARY_FILES if os.path.isdir(Path(name).expanduser()) else ()))
    return [path for file in names if os.path.isfile(path := vocabulary.parent / file)]


def is_sentencepiece(name: str) -> bool:
    """Raises DataError if data.tokenizer=name is missing."""
    return _standard_name(find_vocabulary(name)) == "tokenizer.model"


def read_vocabulary(name: str) -> tuple[Path, bytes]:
    """The vocabulary file of data.tokenizer=name, and its bytes."""
    path = find_vocabulary(name)
    return path, _read_bytes(path)


def load_vocabulary(name: str) -> tokenizers.Tokenizer:
    """The tokenizer of data.tokenizer=name.  Raises DataError for a vocabulary that is missing or damaged."""
    path = find_vocabulary(name)
    load = {"tokenizer.json": _load_tokenizer_json, "vocab.txt": _load_wordpiece, "vocab.json": _load_byte_level}
    with library_errors(f"{path}: cannot be read"):
        tokenizer = load[_standard_name(path)](path)
    _check_ids(tokenizer.get_vocab(with_added_tokens=True), path)
    return tokenizer


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns the library's errors into a DataError that begins with `what`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:  # the library raises plain Exception, and a panic of Rust is not even that
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        reason = f"tokenizers {tokenizers.__version__} says: {error!s:.300}"
        raise DataError(f"{what}: {reason}. Fix it, or save it again with the library.") from None


def _load_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path)
    if problem := _try(text):
        what = f"tokenizers {tokenizers.__version__} cannot read this tokenizer.json: {problem}"
        raise DataError(f"{path}: {what}. Fix it, or save it again with the library.")
    return tokenizers.Tokenizer.from_str(text)


@functools.lru_cache(maxsize=2)
def _try(text: str) -> str:
    """The problem of a tokenizer.json, found in a separate process; '' if there is none."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # finds the same library
    command = [sys.executable, "-P", trial.__file__]  # -P: modules beside the program are not imported
    ended = subprocess.run(command, input=text.encode(), capture_output=True, env=environment, start_new_session=True)
    if ended.returncode == -signal.SIGXCPU:
        return f"it takes more than {trial.MAX_SECONDS} s"
    if ended.returncode < 0:
        return f"it ends the process, or takes more than {trial.MAX_MEMORY:,} bytes"
    return ended.stdout.decode(errors="replace").strip()[:300] or ("no reason is given" if ended.returncode else "")


def _check_ids(token_to_id: dict[str, int], path: Path) -> None:
    ids = set(token_to_id.values())
    if not ids:
        raise DataError(f"{path}: it has no tokens. Download the file again.")
    if len(ids) < len(token_to_id):
        raise DataError(f"{path}: {len(token_to_id)} tokens share {len(ids)} ids. Give each token an id of its own.")
    if max(ids) >= MAX_TOKENS:
        raise DataError(f"{path}: it has the id {max(ids)}. A vocabulary has at most {MAX_TOKENS:,} tokens.")


def _load_wordpiece(path: Path) -> tokenizers.Tokenizer:
    lines = _read_lines(path)
    if not lines[-1]:
        lines.pop()
    token_to_id: dict[str, int] = {}
    for number, line in enumerate(lines):
        token = line.removesuffix("\r")
        first = token_to_id.setdefault(token, number)
        if not token or first != number:
            problem = f"{token!r} is on line {first + 1} already" if token else "is empty"
            raise DataError(f"{path}: line {number + 1}: {problem}. A vocabulary has one token per line, each once.")
    if "[UNK]" not in token_to_id:
        raise DataError(
            f"{path}: there is no [UNK] among its {len(token_to_id)} lines. Add it: it stands for unknown words."
        )
    config = read_settings(path)
    tokenizer = tokenizers.Tokenizer(models.WordPiece(token_to_id, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([token for token in ("[UNK]", *BERT_TOKENS) if token in token_to_id])
    return tokenizer


def _load_byte_level(path: Path) -> tokenizers.Tokenizer:
    token_to_id = _read_json(path)
    valid = all(type(token_id) is int and 0 <= token_id < MAX_TOKENS for token_id in token_to_id.values())
    if not token_to_id or not valid:
        raise DataError(f"{path}: neither a tokenizer.json, which has a `model`, nor tokens with their ids. Fix it.")
    _check_ids(token_to_id, path)
    unknown = "<unk>" if "<unk>" in token_to_id else None
    missing = [letter for letter in bytes_to_unicode() if letter not in token_to_id]
    if missing and not unknown:
        raise DataError(
            f"{path}: {len(missing)} of the 256 bytes have no token, the first {missing[0]!r}, and there is no <unk>. "
            "Add them, or text would be lost."
        )
    merges, merges_path = [], path.with_name("merges.txt")
    for line in _read_lines(merges_path):
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= token_to_id.keys():
            raise DataError(
                f"{merges_path}: {line!r} is not a pair of tokens of {path.name} that merge into a third. "
                "Use the two files of one vocabulary."
            )
        merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(models.BPE(token_to_id, merges, unk_token=unknown))
    add_prefix_space = read_settings(path).get("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in (*EOS_TOKENS, *ROBERTA_TOKENS) if token in token_to_id])
    return tokenizer


def read_settings(vocabulary: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside a vocabulary, with its SETTINGS checked; {} if there is none."""
    path = vocabulary.with_name("tokenizer_config.json")
    config = _read_json(path) if os.path.lexists(path) else {}
    for key in filter(config.__contains__, SETTINGS):
        if not isinstance(config[key], bool) and not (key in MAY_BE_NULL and config[key] is None):
            raise DataError(f"{path}: {key}: expected true or false, got {config[key]!r:.40}. Download the file again.")
    return config


def bos_settings(name: str) -> tuple[bool, str]:
    """add_bos_token and bos_token of the tokenizer_config.json beside the vocabulary of data.tokenizer=name; False and
    '' if unset."""
    config = read_settings(find_vocabulary(name))
    token = config.get("bos_token")
    content = token.get("content") if isinstance(token, dict) else token
    return bool(config.get("add_bos_token")), content if isinstance(content, str) else ""


def read_end_ids(directory: Path) -> list[int]:
    """Ids that end a text, as Hugging Face reads them: eos_token_id, a number or a list, of generation_config.json, or
    else of config.json.  Raises DataError for anything but token ids."""
    for path in (directory / "generation_config.json", directory / CONFIG_JSON):
        given = _read_json(path).get("eos_token_id") if os.path.lexists(path) else None
        if given is not None:
            ids = given if isinstance(given, list) else [given]
            if wrong := [each for each in ids if type(each) is not int or not 0 <= each < MAX_TOKENS]:
                problem = f"eos_token_id: expected a token id below {MAX_TOKENS:,}, or a list, got {wrong[0]!r:.40}"
                raise DataError(f"{path}: {problem}. Correct it, or download the file again.")
            return ids
    return []


def bytes_to_unicode() -> list[str]:
    """GPT-2's letter for each byte: the byte itself where it is printable, else a letter from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _standard_name(vocabulary: Path) -> str:
    """The name that VOCABULARY_FILES gives to the file's format."""
    if vocabulary.suffix in (".txt", ".model"):
        return "vocab.txt" if vocabulary.suffix == ".txt" else "tokenizer.model"
    # `model` may be a token of a vocab.json, as in GPT-2's.
    return "tokenizer.json" if isinstance(_read_json(vocabulary).get("model"), dict) else "vocab.json"


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_bytes(path)
    try:
        content = files.parse_json(text)
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}. Fix it, or download the file again.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, got a {type(content).__name__}. Download the file again.")
    return content


def _read_lines(path: Path) -> list[str]:
    r"""Lines that end in \n; other line breaks are tokens."""
    text = _read_text(path)
    if text.count("\n") > MAX_TOKENS:
        raise DataError(f"{path}: it has more than {MAX_TOKENS:,} lines. Name the file of a vocabulary.")
    return text.split("\n")


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8. Download the file again.") from None


def _read_bytes(path: Path) -> bytes:
    try:
        return files.read_bytes(path, files.MAX_MODEL_FILE)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. A vocab.json needs its merges.txt beside it.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Mend that, or name another file.") from None
