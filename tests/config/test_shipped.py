"""Files under configs/ can be planned as they stand, and laid out over 8 devices."""

import math
import re
from pathlib import Path

import pytest

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.axes import OPTIONAL_AXES
from spmd_lm.config.checks import TASKS
from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig
from spmd_lm.planning.plan_report import describe
from tests.parameter_count import active_parameters, expert_matrices, model_parameters, parameters_by_formula

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(
    path for path in CONFIGS.rglob("*.yaml") if path.stem != "base" and path.parent.name not in ("prepare", "sweeps")
)
BERT_BASE = 109_482_240  # without a head, but with its pooler
POOLER = 768 * 768 + 768
PARAMETERS = {  # of the released weights; BERT's with the two heads of its pre-training
    "gpt2/124m": 124_439_808,
    "gpt2/355m": 354_823_168,
    "gpt2/774m": 774_030_080,
    "gpt2/1.5b": 1_557_611_200,
    "bert/bert-base": 110_106_428,
    "bert/bert-large": 336_226_108,
    "llama/3.2-1b": 1_235_814_400,
    "llama/3.1-8b": 8_030_261_248,
    "llama/3.1-70b": 70_553_706_496,
    "mistral/7b": 7_241_732_096,
    "qwen/2.5-0.5b": 494_032_768,
    "qwen/2.5-7b": 7_615_616_512,
    "qwen/3-0.6b": 596_049_920,
    "qwen/3-8b": 8_190_735_360,
    "gemma/2-2b": 2_614_341_888,
    "gemma/2-9b": 9_241_705_984,
    "gemma/3-1b": 999_885_952,
    "pythia/160m": 162_322_944,
    "pythia/1.4b": 1_414_647_808,
    "pythia/6.9b": 6_857_302_016,
    "moe/mixtral_8x7b": 46_702_792_704,
}
FINETUNED = {  # as transformers counts its BertFor..., of 512 positions
    "finetune/mnli": BERT_BASE + 3 * (768 + 1),
    **dict.fromkeys(("finetune/qqp", "finetune/sst2", "finetune/cola"), 109_483_778),
    "finetune/race": 109_483_009,
    "finetune/squad": 108_893_186,
}
ADAPTED = {  # of the models that they adapt
    "finetune/ia3": FINETUNED["finetune/sst2"],
    **dict.fromkeys(("finetune/lora", "finetune/qlora"), PARAMETERS["llama/3.1-8b"]),
    "finetune/t4": PARAMETERS["llama/3.2-1b"],
}
ROUNDED = {  # as the papers print them, in billions
    "megatron/355m": "0.355",  # arXiv:1909.08053, tables 1, 2 and 4
    "megatron/1.2b": "1.2",
    "megatron/2.5b": "2.5",
    "megatron/4.2b": "4.2",
    "megatron/8.3b": "8.3",
    "megatron/8.3b-scaling": "8.3",
    "bert/megatron-336m": "0.336",
    "bert/megatron-1.3b": "1.3",
    "bert/megatron-3.9b": "3.9",
    "gpt3/175b": "175",  # arXiv:2005.14165, table 2.1
    "recomputation/22b": "22",  # arXiv:2205.05198, table 3
    "recomputation/175b": "175",
    "recomputation/530b": "530",
    "recomputation/1t": "1008",
    "gpt_22b": "22",
    "ptd-p/1t": "1008.0",  # arXiv:2104.04473, table 1
    "moe/switch": "1571",  # arXiv:2101.03961, table 9
} | {f"ptd-p/{b}b": b for b in ("1.7", "3.6", "7.5", "18.4", "39.1", "76.1", "145.6", "310.1", "529.6")}
FAMILIES = {"llama", "mistral", "qwen", "gemma", "pythia"}
EXPERTS = {"moe/gshard": 618_475_290_624}  # their matrices alone: arXiv:2006.16668 has a decoder of another size
TRIALS = {"debug", "moe/debug", "pipeline", "quickstart", "tinyshakespeare", "bert/quickstart"}  # nobody's but ours


def name_of(path):
    return str(path.relative_to(CONFIGS).with_suffix(""))


shipped = pytest.mark.parametrize("path", SHIPPED, ids=name_of)


def planned(path: Path, *overrides: str) -> tuple[RunConfig, dict]:
    config = load(path, overrides)
    return config, describe(config)


@shipped
def test_it_is_planned_as_it_stands(path):
    """The devices are those that it simulates, else as many as its degrees need."""
    config = load(path)
    p = config.parallel
    degrees = {axis: max(degree, 1) for axis, degree in p.degrees.items()}
    devices = config.run.simulate_devices or math.prod(degrees.values())
    _, plan = planned(path, f"run.simulate_devices={devices}")
    if p.data == -1:
        degrees["data"] = devices // math.prod(degrees.values())
    assert plan["mesh"] == {axis: degree for axis, degree in degrees.items() if degree > 1 or axis not in OPTIONAL_AXES}


@shipped
def test_it_has_as_many_parameters_as_were_published(path):
    """Counts agree to the last printed digit."""
    name, count = name_of(path), model_parameters(load(path))
    assert (name in PARAMETERS) + (name in ROUNDED) + (name in FINETUNED | ADAPTED) + (name in {*TRIALS, *EXPERTS}) == 1
    if name in PARAMETERS:
        assert count == PARAMETERS[name]
    elif name in FINETUNED:
        assert model_parameters(load(path, ["model.context=512"])) == FINETUNED[name]
    elif name in ADAPTED:
        context = ["model.context=512"] * (name == "finetune/ia3")
        assert model_parameters(load(path, context)) == ADAPTED[name]
    elif name in ROUNDED:
        digits = len(ROUNDED[name].partition(".")[2])
        assert f"{count / 1e9:.{digits}f}" == ROUNDED[name]
    elif name in EXPERTS:
        assert expert_matrices(load(path)) == EXPERTS[name]


@shipped
def test_the_formula_counts_its_leaves(path):
    config = load(path)
    assert parameters_by_formula(config) == model_parameters(config)


def test_a_token_uses_the_experts_that_it_chooses():
    """Mixtral: 13B active parameters (arXiv:2401.04088, section 1)."""
    header = (CONFIGS / "moe" / "mixtral_8x7b.yaml").read_text()
    active = active_parameters(load(CONFIGS / "moe" / "mixtral_8x7b.yaml"))
    assert active == 12_879_925_248 and f"{active:,}" in header
    assert f"{PARAMETERS['moe/mixtral_8x7b']:,}" in header
    assert f"{EXPERTS['moe/gshard']:,}" in (CONFIGS / "moe" / "gshard.yaml").read_text()
    dense = load(CONFIGS / "mistral" / "7b.yaml")
    assert active_parameters(dense) == model_parameters(dense)


def test_shared_experts_are_used_by_every_token():
    moe = "model.mlp={kind: moe, experts: 8, per_token: 3, width: 24, shared: 40, shared_gate: true}"
    config = load(CONFIGS / "debug.yaml", [moe])
    expert = 64 * 24 * 2 + 24 + 64
    assert parameters_by_formula(config) == model_parameters(config)
    assert parameters_by_formula(config) - active_parameters(config) == 4 * 5 * expert


def test_heads_are_what_the_counts_differ_in():
    assert FINETUNED["finetune/cola"] == BERT_BASE + 2 * (768 + 1)
    assert FINETUNED["finetune/race"] == BERT_BASE + 768 + 1
    assert FINETUNED["finetune/squad"] == BERT_BASE - POOLER + 2 * (768 + 1)


@shipped
def test_it_is_planned_over_eight_devices(path):
    one_stage = (
        "parallel.pipe=1",
        "parallel.expert=1",
        "parallel.chunks=1",
        "parallel.schedule=1f1b",
        "parallel.microbatches=1",
    )
    model = math.gcd(load(path).model.heads, 4)  # GPT-2 XL has 25
    layout = f"parallel.data={8 // model}", f"parallel.model={model}"
    _, plan = planned(path, "run.simulate_devices=8", *layout, *one_stage)
    assert (plan["devices"], plan["mesh"]) == (8, {"pipe": 1, "replica": 1, "data": 8 // model, "model": model})


@pytest.mark.parametrize("path", [each for each in SHIPPED if each.parent.name in FAMILIES], ids=name_of)
def test_its_header_has_its_parameters_and_hardware_that_it_fits(path):
    header = " ".join(line.removeprefix("# ") for line in path.read_text().partition("\n\n")[0].splitlines())
    (hardware,) = re.findall(r"Hardware: (.+)\.$", header)
    plan = describe(load(path), topology=parse_topology(hardware))
    assert plan["parameter_count"] == PARAMETERS[name_of(path)]
    assert f"{plan['parameter_count']:,} parameters" in header
    assert sum(plan["memory"].values()) < 0.92 * plan["capacity"], "as predictions are not exact"


@shipped
def test_its_last_state_is_kept(path):
    """eval and generate read it next."""
    assert load(path).checkpoint.every > 0


@pytest.mark.parametrize("name", FINETUNED)
def test_a_fine_tuning_begins_as_bert_base_and_goes_on_as_it_would(name):
    """No key of the base's data or training is left, and the model is the same."""
    config, base = load(CONFIGS / f"{name}.yaml"), load(CONFIGS / "bert" / "bert-base.yaml")
    assert config.data.task == Path(name).stem and config.data.task in TASKS
    assert config.run.init_from == str(base.run.directory) != str(config.run.directory)
    assert config.data.tokenizer == f"{config.run.init_from}/tokenizer"
    assert config.model == base.model.model_copy(update={"context": config.model.context})
    o, t = config.optim, config.train
    assert o.decay_steps == t.steps == 10 * o.warmup and t.steps % t.eval_every == 0
    assert t.batch == 32 * config.objective.rows_per_example
