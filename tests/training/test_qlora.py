"""QLoRA from one Hugging Face directory to another: it repeats its instructions, and so does transformers."""

import json

import pytest

from spmd_lm.cli import main
from spmd_lm.errors import Exit
from tests.chat_files import CHATML, VOCAB, turns, write_lines, write_tokenizer
from tests.huggingface.small_models import SIZES, random_model

LLAMA = {"vocab_size": VOCAB, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = SIZES | LLAMA | {"num_hidden_layers": 2, "intermediate_size": 128, "max_position_embeddings": 64}
LEARNED = 16  # instructions
DEVICES = ["--devices", "8"]
TRAIN = ["adapter.kind=lora", "adapter.rank=16", "adapter.base=nf4-double", "adapter.modules_to_save=[embed_tokens]"]
TRAIN += ["precision.compute=float32", "precision.frozen=bfloat16", "parallel.zero=3", "checkpoint.every=100"]
TRAIN += ["optim.lr=1e-2", "optim.decay=constant", "optim.weight_decay=0", "model.context=64", "data.pack=false"]


def instructions(count: int) -> list[tuple[str, str]]:
    """Questions, and answers that nothing tells but having seen them."""
    return [(f"What is {n}?", f"{(n * 7919 + 104729) % 9973}.") for n in range(count)]


def learn(where, count: int, steps: int, capfd) -> None:
    """Imports, quantizes, trains, merges and exports; both tools give every answer."""
    model = random_model("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": False}, "float32")
    model.save_pretrained(where / "theirs")
    write_tokenizer(where / "theirs", CHATML)
    pairs = instructions(count)
    path = write_lines(where / "train.jsonl", *(turns(*pair) for pair in pairs))
    base, run, result, ours = (str(where / name) for name in ("base", "run", "result", "ours"))
    assert main(["import", str(where / "theirs"), base]) == Exit.DONE
    data = ["data.source=instructions", f"data.path={path}", f"train.steps={steps}", "train.batch=16"]
    (where / "run.yaml").write_text(f"run: {{dir: {run}, init_from: {base}}}\n")
    assert main(["train", str(where / "run.yaml"), *TRAIN, *data, *DEVICES]) == Exit.DONE
    assert main(["merge", run, result]) == Exit.DONE
    assert main(["export", result, ours]) == Exit.DONE

    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(ours).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(ours)
    capfd.readouterr()
    for question, answer in pairs:
        line = ["--chat", "--prompt", question, "--greedy", "--tokens", "16", "--json", "-"]
        for each in [run, result] if question == pairs[0][0] else [run] if question == pairs[-1][0] else []:
            assert main(["generate", each, *line]) == Exit.DONE
            assert json.loads(capfd.readouterr().out)[0]["text"] == answer
        turn = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = theirs.generate(**given, max_new_tokens=16, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(ids[0, given["input_ids"].shape[1] :])
        assert text.partition("<|im_end|>")[0] == answer


@pytest.mark.slow
def test_instructions_are_learned_and_repeated_here_and_by_transformers(tmp_path, capfd):
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    learn(tmp_path, LEARNED, 150, capfd)
