"""`spmd-lm quantize`: a run whose matrices are codes, the same ones under every layout."""

import json

import jax
import numpy as np
import pytest

from spmd_lm.checkpoints.new_run import write_new_run
from spmd_lm.checkpoints.restored import open_run, restore_run
from spmd_lm.checkpoints.saved_run import load_run_data
from spmd_lm.cli import main
from spmd_lm.config.layers import path_in_block
from spmd_lm.config.load import load_run
from spmd_lm.data.corpus import make_loader
from spmd_lm.errors import ConfigError, Exit, LayoutError
from spmd_lm.evaluation.evaluate import evaluate_run, validation_metrics
from spmd_lm.generation.generate import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.ops.few_bits import CodedMatrix, Coding
from spmd_lm.parallel.trees import from_paths, leaves_by_path
from spmd_lm.quantization import calibration
from spmd_lm.quantization.run import quantize_run
from spmd_lm.step.program import Program
from tests.helpers import FLOAT32, ORIGINAL_BERT, make_config
from tests.own import MIXER, write_module

SLOW = pytest.mark.slow
MODEL = {"width": 64, "mlp_width": 128, "heads": 8, "kv_heads": 4, "vocab": 61, "context": 16, "dropout": 0.0}
LLAMA = {"positions": "rotary", "norm_type": "rms", "activation": "swiglu", "use_bias": False, "tie_embeddings": False}
PERIOD = {"layers": 5, "period": [{"kind": "window", "span": 5}, "block"]}
BERT = ORIGINAL_BERT | {"kv_heads": 8, "vocab": 300}
MODELS = {"llama": LLAMA, "gpt": PERIOD, "bert": BERT}
ONE = [
    f"parallel.{key}"
    for key in ("data=8", "model=1", "pipe=1", "context=1", "replica=1", "zero=0", "microbatches=1", "sequence=false")
]
LAYOUTS = {
    "model 4, sequence, ZeRO-3": ["parallel.data=2", "parallel.model=4", "parallel.sequence=true", "parallel.zero=3"],
    "model 2, ZeRO-1": ["parallel.data=4", "parallel.model=2", "parallel.zero=1"],
    "pipe 2, ZeRO-3": ["parallel.pipe=2", "parallel.data=4", "parallel.zero=3", "parallel.microbatches=2"],
    "context 2, hybrid": ["parallel.context=2", "parallel.data=2", "parallel.replica=2", "parallel.zero=3"],
}
CASES = [
    pytest.param("llama", "gptq", Coding("int4", 16), "model 4, sequence, ZeRO-3"),
    pytest.param("llama", "gptq", Coding("int8"), "context 2, hybrid", marks=SLOW),
    pytest.param("llama", "rtn", Coding("nf4", 64), "pipe 2, ZeRO-3", marks=SLOW),
    pytest.param("gpt", "gptq", Coding("int3", 32), "model 2, ZeRO-1", marks=SLOW),
    pytest.param("bert", "gptq", Coding("nf4", 16), "model 4, sequence, ZeRO-3", marks=SLOW),
    pytest.param("bert", "rtn", Coding("int4"), "context 2, hybrid", marks=SLOW),
]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(calibration, "ROWS", 20)  # which 8 devices do not divide


def make_run(directory, **sections):
    """A run at step 0, whose weights are large enough for attention to matter."""
    sections["model"] = MODEL | sections.get("model", {})
    if sections["model"].get("kind") == "bert":
        sections |= {"objective": {"kind": "masked_lm"}, "data": {"source": "python-stdlib"}}
    sections |= {"precision": FLOAT32 | sections.get("precision", {}), "run": {"dir": str(directory)}}
    config = make_config(parallel={"data": -1}, **{"train": {"batch": 256}} | sections)
    program = Program(config, jax.devices()[:1])
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 2 else x, program.init().params)
    write_new_run(program, params, directory)
    return directory


def parameters(run, overrides=ONE) -> dict[str, np.ndarray]:
    return leaves_by_path(jax.device_get(restore_run(load_run(run, overrides))[1]))


@pytest.mark.parametrize(("model", "method", "coding", "layout"), CASES)
def test_codes_are_the_same_bits_under_every_layout(tmp_path, model, method, coding, layout):
    """And the quantized run computes what the decoded matrices do, under both layouts."""
    run = make_run(tmp_path / "run", model=MODELS[model])  # its batch divides among all layouts' shards
    results = []
    for name, overrides in (("one", ONE), ("other", LAYOUTS[layout])):
        results.append(quantize_run(load_run(run, overrides), tmp_path / name, coding, method))
    one, other = parameters(tmp_path / "one"), parameters(tmp_path / "other")
    assert one.keys() == other.keys()
    for path, x in one.items():
        assert x.dtype == other[path].dtype and np.array_equal(x, other[path]), path
    metrics = [result["after"] for result in results]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5) and metrics[0] != results[0]["before"]

    program, params, _ = restore_run(load_run(run, ONE))
    matrices, plain = program.model.matrices, leaves_by_path(params)
    for path in [path for path in plain if path_in_block(path) in matrices and path.startswith("blocks.")]:
        stored = {key.rpartition(".")[2]: x for key, x in one.items() if key.startswith(f"{path}.")}
        transposed = matrices[path_in_block(path)]
        decoded = [
            CodedMatrix({key: x[i] for key, x in stored.items()}, coding, "", transposed).entries
            for i in range(len(plain[path]))
        ]
        plain[path] = jax.device_put(np.stack(decoded), plain[path].sharding)
    params = program.params_from_canonical(from_paths(plain, program.plan.shapes))
    loader = make_loader(program.config, load_run_data(program.config), "validation")
    assert validation_metrics(program, params, loader)[0] == pytest.approx(metrics[0], rel=1e-5)
    if method == "gptq":
        errors = results[0]["errors"]
        assert (
            len(errors) == results[0]["matrices"] == sum(len(plain[path]) for path in plain if f"{path}.codes" in one)
        )
        assert all(each["gptq"] < each["rtn"] for each in errors.values())
        for path, each in results[1]["errors"].items():
            assert each == pytest.approx(errors[path], rel=1e-9)


@SLOW
def test_a_quantized_run_generates_under_every_layout(tmp_path):
    run = make_run(tmp_path / "run", model=LLAMA | {"vocab": 256}, data={"source": "python-stdlib"})
    quantize_run(load_run(run, ONE), tmp_path / "q", Coding("int4", 16), "rtn")
    texts = set()
    for overrides in (ONE, *LAYOUTS.values()):
        config = load_run(tmp_path / "q", overrides)
        program, params, _ = open_run(config)
        generator = Generator(program, 1, Sampling(tokens=8, greedy=True))
        texts.add(tuple(generator.generate(params, [np.array([3, 5, 7])])[0].tolist()))
    assert len(texts) == 1


@SLOW
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_what_was_trained_to_be_rounded_is_stored_as_it_multiplied(tmp_path, compute):
    """precision.fake_quant's groups, and no other rounding: the quantized run computes the same."""
    run = make_run(tmp_path / "run", model=LLAMA, precision={"compute": compute, "fake_quant": "int4"})
    result = quantize_run(load_run(run, ONE), tmp_path / "q", Coding("int4", 64), "rtn")
    assert result["before"] == pytest.approx(result["after"], rel=1e-6)


def test_the_command_says_what_was_saved(tmp_path, capsys, monkeypatch):
    """And a text in place of the run's own data; what is quantized is trained no further, but the rest is."""
    run, text = make_run(tmp_path / "run", model={"vocab": 256}, data={"source": "python-stdlib"}), tmp_path / "a.txt"
    text.write_text("to be quantized, or not to be quantized\n" * 200)
    line = ["quantize", str(run), str(tmp_path / "q"), "--bits", "int4", "--group", "32", "--method", "gptq"]
    assert main([*line, "--calibrate", str(tmp_path / "b.txt"), *ONE]) == Exit.DATA
    assert f"--calibrate {tmp_path / 'b.txt'}: " in capsys.readouterr().err
    assert main([*line, "--calibrate", str(text), "--json", str(tmp_path / "q.json"), *ONE]) == Exit.DONE
    said, result = capsys.readouterr().out, json.loads((tmp_path / "q.json").read_text())
    assert "12 matrices of step 0 as int4, groups of 32, by gptq: " in said and "eval_perplexity: " in said
    elements = 2 * (4 * 64 * 64 - 2 * 64 * 32 + 2 * 64 * 128)
    assert result["bytes"] == {"multiplied": 4 * elements, "stored": elements // 2 + 4 * elements // 32}
    config = load_run(tmp_path / "q")
    assert evaluate_run(config)["eval_loss"] == pytest.approx(result["after"]["eval_loss"], rel=1e-5)
    before = parameters(tmp_path / "q")
    assert main(["train", str(tmp_path / "q"), "train.steps=2", "checkpoint.every=2", *ONE]) == Exit.DONE
    after = parameters(tmp_path / "q")
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert changed == {path for path in before if not path.endswith((".codes", ".absmax"))}


@pytest.mark.parametrize(
    ("options", "overrides", "problem"),
    [
        (
            ["--bits", "int4", "--group", "48"],
            [],
            "attention.key has 64 inputs, which groups of 48 do not divide",
        ),
        (["--bits", "int4", "--group", "5"], [], "a byte holds the codes of two inputs"),
        (["--bits", "nf4", "--group", "channel"], [], "quantized=nf4 with precision.quantized_group=null"),
        (["--bits", "int8", "--calibrate", "a.txt"], [], "--calibrate has no effect with --method rtn"),
        (["--bits", "int8", "--method", "gptq", "--calibrate", "a.txt"], [], "is calibrated with its own data"),
        (["--bits", "int8", "--method", "gptq", "--calibrate", "s3://a/b"], [], "s3://a/b"),
        (
            ["--bits", "int8"],
            ["parallel.partitioner=types"],
            "partitioner=types with precision.quantized=int8",
        ),
        (["--bits", "int4"], [*ONE, "parallel.data=1", "parallel.model=8"], "would cut groups of 64 inputs"),
    ],
    ids=lambda each: " ".join(each[:4]) if isinstance(each, list) else "",
)
def test_bad_input_is_told(tmp_path, capsys, options, overrides, problem):
    run = make_run(tmp_path / "run")
    assert main(["quantize", str(run), str(tmp_path / "q"), *options, *overrides]) == Exit.CONFIG
    assert problem in capsys.readouterr().err and not (tmp_path / "q").exists()


def test_runs_that_have_codes_or_adapters_are_told(tmp_path):
    run, coding = make_run(tmp_path / "run"), Coding("int4", 16)
    quantize_run(load_run(run, ONE), tmp_path / "q", coding, "rtn")
    with pytest.raises(ConfigError, match=r"is quantized already: precision.quantized=int4. Give the run that it is"):
        quantize_run(load_run(tmp_path / "q", ONE), tmp_path / "again", coding, "rtn")
    with pytest.raises(ConfigError, match=r"has adapters: adapter.kind=lora. Merge them first"):
        quantize_run(load_run(run, [*ONE, "adapter.kind=lora"]), tmp_path / "again", coding, "rtn")
    with pytest.raises(LayoutError, match=r"precision.quantized=int4: parallel.model=8 would cut groups of 16 inputs"):
        evaluate_run(load_run(tmp_path / "q", [*ONE, "parallel.data=1", "parallel.model=8"]))
    assert not (tmp_path / "again").exists()


def test_codes_mean_nothing_in_a_run_of_others(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    quantize_run(load_run(run, ONE), tmp_path / "q", Coding("int4", 16), "rtn")
    nf4 = ["precision.quantized=nf4", "precision.quantized_group=16", f"run.dir={tmp_path / 'new'}", "optim.warmup=0"]
    line = ["train", str(run), *nf4, *ONE]
    assert main(line) == Exit.CONFIG
    assert "would begin with codes of random matrices" in capsys.readouterr().err
    assert main([*line, f"run.init_from={tmp_path / 'q'}"]) == Exit.CHECKPOINT
    assert (
        "has precision.quantized=int4 in groups of 16, and this run precision.quantized=nf4 in groups of 16"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "new").exists()


@SLOW
def test_any_batch_and_pipeline_is_calibrated(tmp_path):
    """8 devices do not divide the run's batch; and two layers' rows have padding, which does not count."""
    texts = [{"prompt": "abc", "completion": "d" * length} for length in range(1, 9)] * 3
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, texts)))
    data = {"source": "instructions", "path": str(tmp_path / "a.jsonl"), "pack": False}
    run = make_run(tmp_path / "run", model={"vocab": 300}, data=data, train={"batch": 6, "eval_every": 0})
    layouts = [["parallel.data=2", "parallel.pipe=2", "parallel.model=2"], ["parallel.pipe=2", "parallel.model=4"]]
    results = [
        quantize_run(load_run(run, overrides), tmp_path / f"q{i}", Coding("int4", 16), "gptq")
        for i, overrides in enumerate(layouts)
    ]
    assert all("validation" in each["not_evaluated"] and each["after"] is None for each in results)
    first, second = (parameters(tmp_path / f"q{i}", layouts[i]) for i in (0, 1))
    assert all(np.array_equal(x, second[path]) for path, x in first.items())


@pytest.mark.parametrize("asks", [True, False])
def test_a_block_of_one_s_own_shows_its_inputs(tmp_path, asks):
    source = MIXER.replace("24", "64").replace("    rules =", '    row_parallel = ("down",)\n    rules =')
    reads = 'self.matrix("up").multiply(copy_to_region(self.norm(x), "state"))'
    assert source.count(reads) == 1
    otherwise = 'copy_to_region(self.norm(x), "state") @ self.up[...]'
    source = source.replace(reads, f"context.checkpoint(lambda x: {reads})(x)" if asks else otherwise)
    run = make_run(tmp_path / "run", model={"module": write_module(tmp_path, "Mixer", source)})
    how = load_run(run, ONE), tmp_path / "q", Coding("int4", 16), "gptq"
    if asks:
        assert all(each["gptq"] < each["rtn"] for each in quantize_run(*how)["errors"].values())
        return
    with pytest.raises(ConfigError, match=r"does not ask for its matrix 'up', which is calibrated"):
        quantize_run(*how)
