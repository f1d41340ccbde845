"""Chat templates: texts are those of transformers, answers are exact, and a hostile one ends in a sentence."""

import datetime
import json
import time

import pytest

from spmd_lm.config.data_sections import Instructions
from spmd_lm.data.instructions.chat_template import ChatTemplate, Rendered, Renderer, find_template
from spmd_lm.data.instructions.files import Conversation
from spmd_lm.data.tokenizers.tokenizer import make_tokenizer
from spmd_lm.errors import ConfigError, DataError
from tests.chat_files import ANSWER, ANSWERS, CHATML, CONVERSATIONS, LAST, MORE, TEMPLATES, USER, write_tokenizer


def data(tokenizer, **keys) -> Instructions:
    return Instructions(source="instructions", path="x", tokenizer=str(tokenizer), **keys)


def find(tokenizer, **keys) -> ChatTemplate:
    section = data(tokenizer, **keys)
    return find_template(section, make_tokenizer(section))


def render(source: str, *messages: dict, seconds: int = 10, **variables: str) -> Rendered:
    template = ChatTemplate("t.jinja", {"default": source}, variables)
    with Renderer(template, seconds=seconds) as renderer:
        (rendered,) = renderer.render([Conversation("a.jsonl: line 7", list(messages))])
    return rendered


def answers(rendered: Rendered) -> list[str]:
    return [rendered.text[first:past] for first, past in rendered.answers]


@pytest.mark.parametrize("style", TEMPLATES)
def test_texts_are_those_of_transformers(tmp_path, style):
    transformers = pytest.importorskip("transformers")
    directory = write_tokenizer(tmp_path / "t", TEMPLATES[style])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    with Renderer(find(directory)) as renderer:
        lines = [Conversation("", *conversation) for conversation in CONVERSATIONS[style]]
        for line, rendered, learned in zip(lines, renderer.render(lines), ANSWERS[style], strict=True):
            given = {"conversation": line.messages, "tools": line.tools, "tokenize": False}
            assert rendered.text == theirs.apply_chat_template(**given)
            assert answers(rendered) == learned
        prompt = lines[0]._replace(messages=lines[0].messages[:-1])
        expected = theirs.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        assert renderer.render_prompt(prompt) == expected


def test_a_template_marks_answers_itself():
    """A template may write earlier messages otherwise once others follow."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}"
        "{{ '!' if loop.last else '.' }}{% endgeneration %}{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
    )
    assert answers(render(source, USER, ANSWER, MORE, LAST)) == ["Yes, naïve 漢字 🙂..", "It is.\nReally!"]
    without = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(
        DataError, match=r"line 7: the chat template t.jinja: it writes the text up to messages\[1\] as"
    ):
        render(without, USER, ANSWER, MORE, LAST)
    inside = "{% macro f(m) %}..{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{{ f(messages[1]) }}"
    with pytest.raises(DataError, match="inside of a macro"):
        render(inside, USER, ANSWER)


def test_an_answer_begins_where_the_generation_prompt_ends():
    source = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{{ '<b>' if add_generation_prompt }}"
    with pytest.raises(DataError, match=r"the prompt of messages\[1\] as '.*<b>' and, once more follows, as '.*<a>Yes"):
        render(source, USER, ANSWER)


@pytest.mark.parametrize(
    ("ending", "learned"),
    [("<end>\n", "Yes<end>"), ("</s>", "Yes</s>"), ("\n", "Yes\n"), ("", "Yes"), (" <end> \n\n", "Yes <end>")],
)
def test_white_space_after_the_end_of_a_turn_is_not_learned(ending, learned):
    """White space alone may end a turn, and is then learned."""
    source = "{% for m in messages %}{{ m.content + end }}{% endfor %}"
    assert answers(render(source, USER, {"role": "assistant", "content": "Yes"}, end=ending)) == [learned]


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "endless": (LOOP, "takes more than 1 s of a processor"),
    "endless in C": ("{{ 9 ** 99999999 }}", "takes more than 1 s"),
    "huge string": ("{{ 'a' * 10000000000 }}", "more memory than it may have"),
    "huge text": ("{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 10,000,000 characters"),
    "wide loop": ("{% for a in range(10000000000) %}{% endfor %}", "OverflowError: Range too big"),
    "private": ("{{ ''.__class__ }}", "asks for '__class__' of a str"),
    "private, by a filter": ("{{ messages | attr('__len__') }}", "asks for '__len__' of a list"),
    "private item": ("{{ messages['__class__'] }}", "asks for '__class__' of a list"),
    "change": ("{{ messages.append(1) }}", "asks for 'append' of a list"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth"),
    "syntax": ("a\n{% if %}", "line 2: Expected an expression"),
    "unknown filter": ("{{ messages | read_file }}", "No filter named 'read_file'"),
    "undefined": ("{{ messages[0].parts.text }}", "has no attribute 'parts'"),
    "refusal": ("{{ raise_exception('Only\nusers: ' + messages[1].role) }}", "it says: Only users: assistant"),
    "include": ("{% include '/etc/passwd' %}", "no loader for this environment"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_ends_in_a_sentence(case):
    source, reason = HOSTILE[case]
    start = time.monotonic()
    with pytest.raises(DataError) as error:
        render(source, USER, ANSWER, seconds=1)
    assert reason in str(error.value) and "chat template t.jinja" in str(error.value) and len(str(error.value)) < 900
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
    assert time.monotonic() - start < 30


def test_helpers_are_those_of_transformers():
    source = (
        "{{ strftime_now('%d %b %Y') }} {{ {'b': '<é>', 'a': [1]} | tojson }}{% if documents or tools %}x{% endif %}"
    )
    assert render(source, USER).text == '26 Jul 2024 {"b": "<é>", "a": [1]}'
    template = ChatTemplate("t.jinja", {"default": source}, {})
    with Renderer(template, datetime.datetime(2031, 1, 2)) as renderer:
        assert renderer.render_prompt(Conversation("", [USER])).startswith("02 Jan 2031")


def test_one_process_renders_all():
    template = ChatTemplate("t.jinja", {"default": CHATML}, {})
    with Renderer(template) as renderer:
        process = renderer.process
        assert len([*renderer.render([Conversation("", [USER, ANSWER])] * 200)]) == 200 and process.poll() is None
    assert process.poll() is not None


def test_where_a_template_stands(tmp_path):
    directory = write_tokenizer(tmp_path / "t")
    with pytest.raises(ConfigError, match="has no chat template, which makes a text of messages"):
        find(directory)
    several = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, {"name": []}, 1]
    write_tokenizer(directory, chat_template=several, pad_token={"content": "<p>"}, unk_token=None)
    found = find(directory)
    assert found.sources == {"default": "d", "tool_use": "t"} and found.path == directory / "tokenizer_config.json"
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>"}
    (directory / "chat_template.jinja").write_text("j")
    assert find(directory).sources == {"default": "j"}
    (tmp_path / "own.jinja").write_text("o")
    assert find(directory, chat_template=str(tmp_path / "own.jinja")).sources == {"default": "o"}
    assert find("bytes", chat_template=str(tmp_path / "own.jinja")).special_tokens["eos_token"] == "\0"
    with pytest.raises(DataError, match="cannot be read: No such file"):
        find(directory, chat_template=str(tmp_path / "none.jinja"))


def test_special_tokens_that_are_declared_as_none_are_none(tmp_path):
    directory = write_tokenizer(tmp_path / "t", "x", bos_token=None)
    assert find(directory).special_tokens == {"eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    assert find(directory).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}, "the vocabulary's own"


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    directory = write_tokenizer(tmp_path / "t", "x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'spmd-lm\[chat\]'"):
        find(directory)
