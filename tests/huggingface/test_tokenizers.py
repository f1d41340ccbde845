"""A run reads text as transformers does, with tokenizers of each family's form: trained here, imported with a model."""

import contextlib
import inspect
import json
import random
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from spmd_lm.checkpoints.saved_run import make_run_tokenizer
from spmd_lm.cli import main
from spmd_lm.config.data_sections import Text
from spmd_lm.config.load import load_run
from spmd_lm.data.corpus import load_data
from spmd_lm.data.tokenizers.tokenizer import begin
from spmd_lm.errors import DataError
from spmd_lm.generation.generate import encode_prompt
from tests.huggingface.small_models import SMALL, import_directory, random_model

LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3_SPLIT += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
Made = tuple[Tokenizer, dict[str, object]]
"""A tokenizer, and the tokenizer_config.json that its family has beside it."""


# --- 1,000 texts

WORDS = ["the", "cat's", "they'LL", "we'Ve", "I'm", "DON'T", "3", "31", "314", "3141592", "1,234.5", "x=y*2"]
WORDS += ["(a)[b]{c}", "...", "?!", "--", "import", "returning", "<", "s>", "<0x0A>"]
WORDS += ["<s>", "</s>", "<unk>", "<eos>", "<bos>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|im_start|>"]
WORDS += ["caf\u00e9", "cafe\u0301", "\u212b\u2126", "\uac00\u1100\u1161", "\ufb01", "\u1e9e\u0130\u0131"]  # NFC or not
WORDS += ["\u65e5\u672c\u8a9e", "\u0e44\u0e17\u0e22", "\u0627\u0644\u0639\u0631\u0628\u064a"]
WORDS += ["\u0939\u093f\u0928\u094d"]
WORDS += ["\u0661\u0662\u0663", "\u00bd\u00b2\u2167", "\uff41\uff11", "\U00010348"]  # digits that \p{N} has
WORDS += ["\U0001f469\u200d\U0001f680", "\U0001f1e9\U0001f1ea", "\U0001f44d\U0001f3fd"]  # of several code points
WORDS += ["\u2581", "\u2581a", "\u0120", "\ufffd", "\ufeff", "\x00", "\x7f\x1b"]
GAPS = ["", *[" "] * 3, "  ", "   ", " " * 7, " " * 24, "\t", "\n", "\n\n", " \n ", "\r\n"]
GAPS += ["\u00a0", "\u3000", "\u2028"]
AT_THE_START = ("<s>", "<bos>", "<|begin_of_text|>")
"""A text that begins with its tokenizer's own token: transformers puts a second one before it, and a run does not."""


def some_texts() -> list[str]:
    """Texts, half of Python's sources, half mixtures of what tokenizers treat differently."""
    draw = random.Random(5)
    source = inspect.getsource(textwrap) + inspect.getsource(random) + inspect.getsource(inspect)
    starts = [draw.randrange(len(source)) for _ in range(500)]
    texts = [source[start : start + draw.randrange(1, 400)] for start in starts]
    while len(texts) < 999:
        text = "".join(draw.choice(WORDS) + draw.choice(GAPS) for _ in range(draw.randrange(1, 20)))
        text = draw.choice(["", "", " ", "\n", "   "]) + text
        if not text.startswith(AT_THE_START):
            texts.append(text)
    return [*texts, ""]


TEXTS = some_texts()


# --- a tokenizer of each family


def merges_of(pre_tokenizer, alphabet: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The letters and the merges of a small BPE."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS[:500], trainer)  # few letters but ASCII's: others are spelled in bytes
    model = json.loads(made.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    joined = {a + b for a, b in merges}
    return [token for token in model["vocab"] if token not in joined], merges


def bpe(specials: list[str], letters: list[str], merges: list[tuple[str, str]], **settings: object) -> Tokenizer:
    tokens = dict.fromkeys([*specials, *letters, *(a + b for a, b in merges)])
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges, **settings))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return made


def split_bytes(regex: str):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def starts_with(made: Tokenizer, bos: str):
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, made.token_to_id(bos))]
    )


def llama3() -> Made:
    letters, merges = merges_of(split_bytes(LLAMA3_SPLIT), pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    # No merges make it: ignore_merges looks it up.
    made = bpe(specials, [*letters, "\u0120returning"], [*merges, ("1", "4"), ("3", "14")], ignore_merges=True)
    made.pre_tokenizer, made.decoder = split_bytes(LLAMA3_SPLIT), decoders.ByteLevel()
    byte_level = processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=True)
    made.post_processor = processors.Sequence([byte_level, starts_with(made, specials[0])])
    return made, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": specials[0], "eos_token": specials[1]}


def qwen() -> Made:
    letters, merges = merges_of(split_bytes(QWEN_SPLIT), pre_tokenizers.ByteLevel.alphabet())
    made = bpe(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], letters, merges)
    made.normalizer, made.pre_tokenizer = normalizers.NFC(), split_bytes(QWEN_SPLIT)
    made.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    config = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|endoftext|>"}
    return made, config | {"add_bos_token": False, "add_prefix_space": False, "pad_token": "<|endoftext|>"}


def neox() -> Made:
    letters, merges = merges_of(pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.ByteLevel.alphabet())
    made = bpe(["<|endoftext|>", "<|padding|>"], letters, merges)
    made.add_tokens([AddedToken(" " * spaces, normalized=True) for spaces in range(24, 1, -1)])
    made.normalizer, made.pre_tokenizer = normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor, made.decoder = processors.ByteLevel(trim_offsets=True), decoders.ByteLevel()
    config = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return made, config | {"tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False}


SPACES = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def mistral() -> Made:
    """Mistral's and Llama 2's, in the form to which SentencePiece models were converted."""
    letters, merges = merges_of(pre_tokenizers.Metaspace(), [])
    specials = ["<unk>", "<s>", "</s>"]
    made = bpe(specials, [*BYTE_TOKENS, *letters], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.post_processor = starts_with(made, "<s>")
    made.decoder = decoders.Sequence([*SPACES, decoders.Strip(" ", 1, 0)])
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": True}
    return made, config | {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def gemma() -> Made:
    letters, merges = merges_of(pre_tokenizers.Metaspace(prepend_scheme="never"), [])
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    merges += [("\u2581", "\u2581"), ("\u2581" * 2, "\u2581" * 2)]
    made = bpe(specials, [*BYTE_TOKENS, *letters], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.post_processor, made.decoder = starts_with(made, "<bos>"), decoders.Sequence(SPACES)
    config = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False}
    return made, config | {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}


class Family(NamedTuple):
    """architecture: that the tokenizer is imported with.  bos: that begins a text.  used: tokens that texts have."""

    build: Callable[[], Made]
    architecture: str
    bos: str | None
    used: tuple[str, ...]


FAMILIES = {
    "Llama 3": Family(llama3, "LlamaForCausalLM", "<|begin_of_text|>", ("\u0120returning", "314", "<|eot_id|>")),
    "Llama 2": Family(mistral, "LlamaForCausalLM", "<s>", ("<0xF0>", "</s>")),
    "Mistral": Family(mistral, "MistralForCausalLM", "<s>", ("<0xF0>", "</s>")),
    "Qwen": Family(qwen, "Qwen2ForCausalLM", None, ("<|im_start|>", "<|endoftext|>")),
    "Gemma": Family(gemma, "Gemma2ForCausalLM", "<bos>", ("<0xF0>", "<eos>", "\u2581" * 4)),
    "GPT-NeoX": Family(neox, "GPTNeoXForCausalLM", None, (" " * 24, "  ", "<|endoftext|>")),
}
QUICK = ("Llama 3", "Llama 2", "Gemma")
TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
TINY |= {"intermediate_size": 8, "max_position_embeddings": 8}
STARTS_WITH_SPACE = re.compile("(^|<s>|</s>|<unk>)[ \u2581]")
"""Here transformers' LlamaTokenizer leaves out the mark that the file's normalizer puts, and SentencePiece too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_ids_are_those_of_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    family = FAMILIES[name]
    made, settings = family.build()
    sizes = TINY | {"vocab_size": made.get_vocab_size()}
    random_model(family.architecture, sizes, "float32").save_pretrained(tmp_path / "model")
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = make_run_tokenizer(import_directory(tmp_path / "model", tmp_path / "run"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")

    texts = [text for text in TEXTS if name != "Llama 2" or not STARTS_WITH_SPACE.search(text)]
    expected = theirs(texts)["input_ids"]
    for text, ids in zip(texts, expected, strict=True):
        assert begin(ours, ours.encode(text)).tolist() == ids, text
    assert len(texts) == 1000 or (name == "Llama 2" and len(texts) > 500)
    assert expected[-1] == ([made.token_to_id(family.bos)] if family.bos else []), "the empty text"
    used = {token for ids in expected for token in ids}
    assert {made.token_to_id(token) for token in family.used} <= used and len(used) > made.get_vocab_size() // 2


def test_added_tokens_beyond_the_vocabulary_matter_where_a_text_has_them(tmp_path, capsys):
    """<image_soft_token> is one, which Gemma 3's text models lack."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    made, settings = gemma()
    sizes = TINY | {"vocab_size": (size := made.get_vocab_size())}
    random_model("Gemma3ForCausalLM", sizes, "float32").save_pretrained(tmp_path / "model")
    made.add_special_tokens(["<image>"])
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    assert main(["import", str(tmp_path / "model"), str(tmp_path / "run"), *SMALL]) == 0
    assert "not read: tokens that the model lacks: '<image>'" in capsys.readouterr().out
    config = load_run(tmp_path / "run")
    assert made.token_to_id("<image>") == size == config.model.vocab

    text = tmp_path / "text.txt"
    data = Text(source="text", tokenizer=config.data.tokenizer, path=[str(text)])
    for content, problem in (("a <image> b " * 99, f"token {size} at offset 2 is not below"), ("a b " * 99, "")):
        text.write_text(content)
        with pytest.raises(DataError, match=problem) if problem else contextlib.nullcontext():
            load_data(data, 0, size)
    with pytest.raises(DataError, match=f"token {size} is not below model.vocab={size}"):
        encode_prompt(make_run_tokenizer(config), "<image>", size)
