"""Chat templates in the styles of published models, a small tokenizer that knows their tokens, and conversations."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from spmd_lm.data.tokenizers.vocabulary import bytes_to_unicode

LLAMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{%- if system or tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\n' + system }}
    {%- for tool in tools or [] %}
        {{- '\n' + (tool | tojson(indent=2)) }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in rest %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\n' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
    {{- '<tool_call>' + (call | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}"""

MISTRAL = """{{ bos_token }}
{%- set first = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set first.system = message.content + '\n\n' %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + first.system + message.content + ' [/INST]' }}
        {%- set first.system = '' %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, not ' + message.role) }}
    {%- endif %}
{%- endfor %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

TEMPLATES = {"llama": LLAMA, "chatml": CHATML, "gemma": GEMMA, "mistral": MISTRAL, "zephyr": ZEPHYR}

USER, ANSWER = (
    {"role": "user", "content": " What is  2 < 3 & é? "},
    {"role": "assistant", "content": "Yes, naïve 漢字 🙂."},
)
MORE, LAST = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It is.\nReally"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"x": "<number> & é"}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"x": 1}}}]}

CONVERSATIONS = {  # of each style, what it writes: messages and tools
    "llama": [([SYSTEM, USER, ANSWER, MORE, LAST], None), ([USER, ANSWER], [TOOL])],
    "chatml": [
        ([SYSTEM, USER, ANSWER, MORE, LAST], None),
        ([USER, CALL, {"role": "tool", "content": "3"}, ANSWER], [TOOL]),
    ],
    "gemma": [([USER, ANSWER, MORE, LAST], None)],
    "mistral": [([SYSTEM, USER, ANSWER, MORE, LAST], None), ([USER, ANSWER], None)],
    "zephyr": [([SYSTEM, USER, ANSWER, MORE, LAST], None), ([USER, ANSWER], None)],
}
ANSWERS = {  # of each of them, what is to be learned
    "llama": [["Yes, naïve 漢字 🙂.<|eot_id|>", "It is.\nReally<|eot_id|>"], ["Yes, naïve 漢字 🙂.<|eot_id|>"]],
    "chatml": [
        ["Yes, naïve 漢字 🙂.<|im_end|>", "It is.\nReally<|im_end|>"],
        [
            '<tool_call>{"function": {"name": "add", "arguments": {"x": 1}}}</tool_call><|im_end|>',
            "Yes, naïve 漢字 🙂.<|im_end|>",
        ],
    ],
    "gemma": [["Yes, naïve 漢字 🙂.<end_of_turn>", "It is.\nReally<end_of_turn>"]],
    "mistral": [[" Yes, naïve 漢字 🙂.</s>", " It is.\nReally</s>"], [" Yes, naïve 漢字 🙂.</s>"]],
    "zephyr": [["Yes, naïve 漢字 🙂.</s>", "It is.\nReally</s>"], ["Yes, naïve 漢字 🙂.</s>"]],
}

SPECIAL = ["<s>", "</s>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>"]
MERGES = [("Ġ", "2"), ("Ġ", "Y"), ("Y", "e"), ("Ye", "s"), ("I", "t"), ("Ġ", "i"), ("Ġi", "s"), ("Ċ", "Ċ"), ("i", "s")]
VOCAB = 256 + len(MERGES) + len(SPECIAL)


def write_tokenizer(directory: Path, template: str | None = None, **settings: object) -> Path:
    """A byte-level tokenizer.json that begins a text with <s>, and whose offsets are trimmed, as Llama 3's are; the
    template in its tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    letters = [*bytes_to_unicode(), *("".join(pair) for pair in MERGES)]
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    begin = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", made.token_to_id("<s>"))])
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    made.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | settings
    config |= {"chat_template": template} if template is not None else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_lines(path: Path, *lines: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def turns(*contents: str) -> dict:
    """A conversation of user and assistant."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}
