"""The token that begins a text is put where the vocabulary's own files put it, or data.bos says; once, never twice."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from spmd_lm.config.data_sections import Text
from spmd_lm.data.corpus import load_data
from spmd_lm.data.tokenizers.tokenizer import begin, make_tokenizer
from spmd_lm.errors import ConfigError, DataError
from spmd_lm.evaluation.continuations import Encoder
from spmd_lm.generation.generate import encode_prompt

WORDS = ["<unk>", "a", "b", "c"]


def save(directory: Path, specials: list[str], template: str | None = None, **settings: object) -> str:
    """A tokenizer.json of words, whose post-processor is the template."""
    directory.mkdir(exist_ok=True)
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(specials)
    if template:
        ids = [(token, made.token_to_id(token)) for token in specials]
        made.post_processor = processors.TemplateProcessing(single=template, pair=None, special_tokens=ids)
    made.save(str(directory / "tokenizer.json"))
    if settings:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(directory)


def tokenizer(name: str, **keys):
    return make_tokenizer(Text(source="text", path="x", tokenizer=name, **keys))


LLAMA, GPT2, BERT = ["<s>", "</s>"], ["<|endoftext|>"], ["[CLS]", "[SEP]", "[MASK]", "[PAD]"]
CASES = {
    "llama": (LLAMA, "<s> $A", {}, 4),
    "with an end": (LLAMA, "<s> $A </s>", {}, 4),
    "another name": (["<begin>", "<end>"], "<begin> $A", {}, 4),
    "an end alone": (LLAMA, "$A </s>", {}, None),
    "none": (LLAMA, None, {}, None),
    "gpt2": (GPT2, None, {"bos_token": GPT2[0]}, None),
    "bert": (BERT, "[CLS] $A [SEP]", {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_auto_is_the_tokenizers_own_rule_as_transformers_has_it(tmp_path, case):
    specials, template, settings, bos = CASES[case]
    ours = tokenizer(save(tmp_path / "t", specials, template, **settings))
    ids = ours.encode("a b")
    begun = begin(ours, ids).tolist()
    assert begun == ([] if bos is None else [bos]) + ids.tolist()
    if case != "bert":  # whose rows have a token of their own
        theirs = pytest.importorskip("transformers").PreTrainedTokenizerFast(
            tokenizer_file=str(tmp_path / "t" / "tokenizer.json")
        )("a b")["input_ids"]
        assert theirs[: len(begun)] == begun


@pytest.mark.parametrize(
    ("settings", "bos"),
    [
        ({"add_bos_token": True, "bos_token": "<x>"}, "<x>"),
        ({"add_bos_token": True, "bos_token": {"content": "<x>"}}, "<x>"),
        ({"add_bos_token": True}, "<s>"),
        ({"add_bos_token": False, "bos_token": "<x>"}, None),
        ({"add_bos_token": None}, None),
    ],
)
def test_a_tokenizer_config_says_it_where_there_is_no_template(tmp_path, settings, bos):
    made = tokenizer(save(tmp_path / "t", ["<s>", "<x>"], **settings))
    expected = [] if bos is None else [made.token_to_id[bos]]
    assert begin(made, made.encode("a")).tolist() == [*expected, 1]


def test_a_declared_token_that_is_none_is_refused(tmp_path):
    with pytest.raises(DataError, match="declares bos_token '<y>', which it has not"):
        tokenizer(save(tmp_path / "t", LLAMA, add_bos_token=True, bos_token="<y>"))


@pytest.mark.parametrize("text", ["A", "a", "日"])
@pytest.mark.parametrize(("template", "bos"), [("$A </s>", None), ("<s> $A </s>", 0), ("<s> <s> $A", 0), (None, None)])
@pytest.mark.parametrize("family", ["BPE", "WordPiece", "WordLevel", "Unigram"])
def test_the_rule_is_read_whatever_the_vocabulary_can_spell(tmp_path, family, template, bos, text):
    """Most of these have no token for most texts, and none that stands for what is unknown."""
    words = ["<s>", "</s>", "<unk>", text]
    ids = {word: number for number, word in enumerate(words)}
    made = Tokenizer(
        {
            "BPE": lambda: models.BPE(ids, []),
            "WordPiece": lambda: models.WordPiece(ids, unk_token="<unk>"),
            "WordLevel": lambda: models.WordLevel({word: ids[word] for word in ids if word != "<unk>"}),
            "Unigram": lambda: models.Unigram([(word, -1.0) for word in words], unk_id=2),
        }[family]()
    )
    if template:
        made.post_processor = processors.TemplateProcessing(
            single=template, pair=None, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    made.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizer(str(tmp_path))
    assert begin(ours, ours.encode(text)).tolist() == ([] if bos is None else [bos]) + [3]


@pytest.mark.parametrize("token_id", [6, 300, 2**20, 2**31])
def test_an_id_of_a_post_processor_that_no_token_has_is_refused(tmp_path, token_id):
    path = Path(save(tmp_path / "t", LLAMA, "<s> $A")) / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"]["special_tokens"]["<s>"]["ids"] = [token_id]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"begins a text with the id {token_id}, which no token has"):
        tokenizer(str(path))


def test_several_tokens_that_begin_a_text_are_told(tmp_path):
    name = save(tmp_path / "t", ["[gMASK]", "<bos>"], "[gMASK] <bos> $A")
    with pytest.raises(ConfigError, match=r"with \[gMASK\], <bos>, and only one .* Set data\.bos to true or false"):
        tokenizer(name)
    assert tokenizer(name, bos=False).bos_before == "nothing"
    assert tokenizer(name, bos=True).bos_token_id == 5


@pytest.mark.parametrize("value", [1, 0, "true", [True], 1.5, {}])
def test_a_setting_of_another_type_is_refused(tmp_path, value):
    with pytest.raises(DataError, match=r"tokenizer_config\.json: add_bos_token: expected true or false"):
        tokenizer(save(tmp_path / "t", LLAMA, add_bos_token=value))


@pytest.mark.parametrize("text", ["a b", "<s> a b", "<s>", ""])
def test_it_is_put_once_before_documents_contexts_and_prompts(tmp_path, text):
    name = save(tmp_path / "t", LLAMA, "<s> $A")
    made = tokenizer(name)
    assert begin(made, begin(made, made.encode(text))).tolist().count(4) == 1
    assert encode_prompt(made, text, 6).tolist().count(4) == 1
    encoder = Encoder(made, 6)
    item = encoder.continuation(text, " c", "here")
    assert [*item.context].count(4) == 1 and item.context[0] == 4 and item.ids.tolist() == [3]
    assert encoder.document(text, "here").tolist().count(4) == 1
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"{text or 'a'} {'c ' * number}")
    data = Text(source="text", path=str(tmp_path / "?.txt"), tokenizer=name, validation_fraction=0.5)
    corpus = load_data(data, 0, 6)
    for split in ([*corpus.train], [*corpus.validation]):  # documents are separated by 5
        assert split[0] == 4 and split.count(4) == split.count(5) + 1
    if not text.startswith("<s>"):
        assert 4 not in load_data(data, 0, 6, rules=1).train, "a run that began without goes on without"


def test_false_puts_none_and_true_one_everywhere(tmp_path):
    llama, gpt2 = save(tmp_path / "l", LLAMA, "<s> $A"), save(tmp_path / "g", GPT2)
    off, on = tokenizer(llama, bos=False), tokenizer(gpt2, bos=True)
    assert begin(off, off.encode("a")).tolist() == [1] == encode_prompt(off, "a", 6).tolist()
    assert encode_prompt(off, "", 6).tolist() == [4]  # a text has to begin somehow
    assert begin(on, on.encode("a")).tolist() == [4, 1] == encode_prompt(on, "a", 6).tolist()
    assert begin(on, on.encode("a"), document=True).tolist() == [1], "its separator is there already"
    auto = tokenizer(gpt2)
    assert begin(auto, auto.encode("a")).tolist() == [1] and encode_prompt(auto, "a", 6).tolist() == [4, 1]
    data = tokenizer("bytes")
    assert begin(data, data.encode("a")).tolist() == [97] and encode_prompt(data, "\0a", 256).tolist() == [0, 97]


def test_true_without_such_a_token_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.bos=true, but the tokenizer has no token .* Use data\.bos=auto"):
        tokenizer(save(tmp_path / "t", ["<pad>"]), bos=True)
    assert tokenizer(save(tmp_path / "t", ["<pad>"])).bos_token_id is None


def test_ids_without_a_token_have_no_text(tmp_path):
    made = tokenizer(save(tmp_path / "t", LLAMA))
    assert made.has_text(9).tolist() == [True] * 6 + [False] * 3
    assert tokenizer("bytes").has_text(258).tolist() == [True] * 256 + [False] * 2
