import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_lm.config.layout_checks import check_devices
from spmd_lm.config.load import load
from spmd_lm.config.suggest import divisors
from spmd_lm.config.types import MOST
from spmd_lm.errors import ConfigError

FLOAT16 = "precision.compute=float16 precision.loss_scale=dynamic"
DYNAMIC, YARN = (
    f"model.rope_scaling.kind={kind} model.rope_scaling.factor=2 model.rope_scaling.original_context=9"
    for kind in ("dynamic", "yarn")
)
MOE = "model.mlp.kind=moe model.mlp.experts=8"
CUDNN = "model.attention=cudnn model.attention_dropout=0 precision.compute=bfloat16"
MASKED = "objective.kind=masked_lm model.kind=bert model.vocab=260"
TASK = "model.kind=bert model.vocab=260 data.source=task data.path=a data.validation_path=b"
CLASSES = f"{TASK} data.task=mnli objective.kind=classification objective.classes=3"
CHOICES = f"{TASK} data.task=race objective.kind=multiple_choice"
DEBUG = Path(__file__).parents[2] / "configs" / "debug.yaml"  # 4 layers, 8 heads, width 64, context 64, batch 16


def problems(*overrides: str) -> list[str]:
    """The problems of debug.yaml with these overrides, without their origins."""
    try:
        load(DEBUG, overrides)
    except ConfigError as error:
        return [problem.split(": ", 1)[1] for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("overrides", "what", "use"),
    [
        (
            "precision.fake_quant=int4 adapter.kind=lora",
            "precision.fake_quant=int4 with adapter.kind=lora: nothing rounds what an adapter adds",
            "precision.fake_quant=none, or adapter.kind=none",
        ),
        (
            f"precision.fake_quant=int8 {MOE}",
            "precision.fake_quant=int8 with model.mlp.kind=moe: stacks of experts, most of the model, are not rounded",
            "precision.fake_quant=none",
        ),
        (
            "precision.fake_quant=int4 parallel.partitioner=types",
            "parallel.partitioner=types with precision.fake_quant=int4: types cannot tell that groups of inputs are on "
            "one device",
            "parallel.partitioner=auto",
        ),
        (
            "precision.fake_quant=int4 parallel.zero=3 parallel.quantize_gather=int8",
            "parallel.quantize_gather=int8 with precision.fake_quant=int4: what is rounded would be rounded already",
            "parallel.quantize_gather=none, or precision.fake_quant=none",
        ),
        (
            "precision.fake_quant=int4 parallel.model=2 parallel.collective_matmul=on",
            "parallel.collective_matmul=on with precision.fake_quant=int4: backward would keep the rounded matrices",
            "precision.fake_quant=none, or parallel.collective_matmul=auto",
        ),
        (
            "precision.matmul=fp8 precision.fake_quant=int4",
            "precision.matmul=fp8 with precision.fake_quant=int4: matrices are rounded already",
            "precision.matmul=none, or precision.fake_quant=none",
        ),
        (
            "precision.matmul=int8 adapter.kind=lora",
            "precision.matmul=int8 with adapter.kind=lora: what an adapter adds would not be in eight bits",
            "precision.matmul=none, or adapter.kind=none",
        ),
        (
            f"precision.matmul=fp8 {MOE}",
            "precision.matmul=fp8 with model.mlp.kind=moe: stacks of experts, most of the model, would not be in eight "
            "bits",
            "precision.matmul=none",
        ),
        (
            "precision.matmul=fp8 parallel.partitioner=types",
            "parallel.partitioner=types with precision.matmul=fp8: types cannot tell that a scale is of one device's "
            "shard",
            "parallel.partitioner=auto",
        ),
        (
            "precision.emulate=true",
            "precision.emulate=true has no effect with precision.matmul=none",
            "precision.emulate=false",
        ),
        (
            "train.eval_tasks=[lambada=a] train.eval_every=0",
            "train.eval_tasks with train.eval_every=0, which evaluates nothing",
            "train.eval_every=100",
        ),
        (
            "checkpoint.keep_best=eval_loss train.eval_every=4",
            "checkpoint.keep_best=eval_loss with checkpoint.every=10, which is no multiple of train.eval_every=4: some "
            "have no figure",
            "checkpoint.every=8 or 12, or train.eval_every=10",
        ),
        *(
            (
                f"checkpoint.keep_best={figure}",
                f"checkpoint.keep_best={figure}, which says nothing of how good a model is, as losses and figures of "
                "evaluations do",
                "checkpoint.keep_best=eval_loss, or checkpoint.keep_best=loss",
            )
            for figure in ("loss_scale", "seconds", "grad_norm", "lr")
        ),
        (
            "checkpoint.keep_best=loss checkpoint.every=0",
            "checkpoint.keep_best=loss with checkpoint.every=0, which saves nothing",
            "checkpoint.every=1",
        ),
        (
            "model.heads=10",
            "model.width=64 is not divisible by model.heads=10",
            "model.heads=4 or 8, or model.width=60 or 70",
        ),
        (
            "model.width=192 model.heads=12 parallel.model=8",
            "model.heads=12 is not divisible by parallel.model=8 (attention query, dim 'heads')",
            "parallel.model=4 or 6, or model.heads=16",
        ),
        (  # 6 would leave no whole number of 8 devices to `data`
            "model.width=192 model.heads=12 parallel.model=8 run.simulate_devices=8",
            "model.heads=12 is not divisible by parallel.model=8 (attention query, dim 'heads')",
            "parallel.model=2 or 4, or model.heads=16",
        ),
        (
            "model.mlp_width=100 parallel.model=8",
            "model.mlp_width=100 is not divisible by parallel.model=8 (MLP, dim 'mlp')",
            "parallel.model=2 or 4, or model.mlp_width=96 or 104",
        ),
        (
            "parallel.expert=2",
            "parallel.expert=2 with model.mlp.kind=dense: there are no experts to divide",
            "parallel.expert=1, or model.mlp='{kind: moe, experts: 8}'",
        ),
        (
            "parallel.context=2 model.context=62 run.simulate_devices=8",
            "model.context=62 is not divisible by the two chunks of each device of parallel.context=2",
            "parallel.context=1, or model.context=60 or 64",
        ),
        (
            "parallel.context=2 parallel.model=4 parallel.sequence=true model.context=68 run.simulate_devices=8",
            "model.context=68 is not divisible by the two chunks and the shards of parallel.sequence=true, 4 parts, of "
            "each device of parallel.context=2",
            "parallel.context=1, or model.context=64 or 72",
        ),
        (
            "parallel.context=4 parallel.model=4 parallel.context_attention=heads",
            "parallel.context_attention=heads: model.heads=8 over parallel.model=4 is not divisible by "
            "parallel.context=4",
            "parallel.context_attention=ring, or parallel.context=1 or 2",
        ),
        (
            'parallel.context=4 parallel.context_attention=heads model.heads=2 model.period=["block",{"kind":"window",'
            '"span":3}]',
            "parallel.context_attention=heads: model.heads=2 is not divisible by parallel.context=4",
            "parallel.context=1 or 2",
        ),
        (
            'parallel.context=4 parallel.context_attention=ring model.heads=2 model.period=["block",{"kind":"window",'
            '"span":3}]',
            "span=3 of model.period with parallel.context_attention=ring: a ring's hops are whole or causal, without "
            "windows",
            "parallel.context=1",
        ),
        (
            'parallel.context=4 parallel.context_attention=ring model.period=["block",{"kind":"window","span":3}]',
            "span=3 of model.period with parallel.context_attention=ring: a ring's hops are whole or causal, without "
            "windows",
            "parallel.context_attention=heads",
        ),
        *(
            (
                f"parallel.pipe=2 parallel.context=4 {own}",
                "parallel.pipe=2 with a ring over parallel.context=4: idle stages would not take part in its permutes, "
                "which all devices wait for",
                f"parallel.run_idle_stages=true{other}",
            )
            for own, other in (
                ("parallel.context_attention=ring", ", or parallel.context_attention=heads"),
                ("parallel.model=4", ""),
            )
        ),
        (
            "parallel.context=2 parallel.context_attention=ring model.attention=xla",
            "model.attention=xla in a ring over parallel.context=2: the dense kernel does not return its sums of "
            "exponentials, by which a ring's results are merged",
            "model.attention=chunked",
        ),
        (
            'parallel.context=4 model.period=[{"kind":"block","heads":2,"head_width":8},{"kind":"window","span":3}]',
            "span=3 of model.period with parallel.context=4, where model.heads=2 is not divisible by "
            "parallel.context=4: a ring's hops are whole or causal, without windows",
            "parallel.context=1 or 2",
        ),
        (
            f"{MOE} model.mlp.capacity=1.0 parallel.context=4",
            "model.mlp.group=null with parallel.context=4: tokens that share an expert's capacity would be on several "
            "devices",
            "model.mlp.group=16, or model.mlp.capacity=none model.mlp.group=null",
        ),
        (
            f"{MOE} model.mlp.group=16 parallel.context=4 parallel.context_attention=ring",
            "model.mlp.group=16 with parallel.context=4: tokens that share an expert's capacity would be on several "
            "devices",
            "model.mlp.group=4 or 8, or model.mlp.capacity=none model.mlp.group=null",
        ),
        (
            "parallel.context=2 parallel.partitioner=types",
            "parallel.partitioner=types with parallel.context=2: devices exchange heads or send keys around, which "
            "sharding types do not describe",
            "parallel.partitioner=auto",
        ),
        (
            f"{MOE} parallel.expert=3",
            "model.mlp.experts=8 is not divisible by parallel.expert=3",
            "parallel.expert=2 or 4, or model.mlp.experts=6 or 9",
        ),
        (
            f"{MOE} model.mlp.per_token=9",
            "model.mlp.per_token=9 is more than model.mlp.experts=8",
            "model.mlp.per_token=8",
        ),
        (
            f"{MOE} model.mlp.group=24",
            "model.context=64 is not divisible by model.mlp.group=24, the tokens that compete for experts",
            "model.mlp.group=16 or 32, or model.context=48 or 72",
        ),
        (
            f"{MOE} model.mlp.capacity=0.05",
            "model.mlp.capacity=0.05 leaves an expert less than one of a group's 64 tokens, with model.mlp.experts=8 "
            "and model.mlp.per_token=2",
            "model.mlp.capacity=0.07 or more, or model.mlp.capacity=none",
        ),
        (
            f"{MOE} adapter.kind=lora adapter.base=nf4",
            "adapter.base=nf4 with model.mlp.kind=moe: stacks of experts, most of the model, have no codes",
            "adapter.base=none",
        ),
        (
            f"{MOE} model.mlp.shared_gate=true",
            "model.mlp.shared_gate=true has no effect without model.mlp.shared, whose output it multiplies",
            "model.mlp.shared_gate=false, or model.mlp.shared=256",
        ),
        (
            f"{MOE} parallel.partitioner=types",
            "parallel.partitioner=types with model.mlp.kind=moe: tokens go to slots of buffers, which sharding types "
            "cannot describe",
            "parallel.partitioner=auto",
        ),
        (
            f"{MOE} model.mlp.width=100 parallel.model=8",
            "model.mlp.width=100 is not divisible by parallel.model=8 (experts, dim 'mlp')",
            "parallel.model=2 or 4, or model.mlp.width=96 or 104",
        ),
        (
            f"{MOE} model.mlp.shared=100 parallel.model=8",
            "model.mlp.shared=100 is not divisible by parallel.model=8 (shared MLP, dim 'mlp')",
            "parallel.model=2 or 4, or model.mlp.shared=96 or 104",
        ),
        (
            f"{MOE} parallel.expert=2 parallel.data=4 run.simulate_devices=8 train.batch=12",
            "train.batch=12 in parallel.microbatches=1 gives 12 sequences, not divisible by parallel.replica=1 x "
            "data=4 x parallel.expert=2",
            "train.batch=8 or 16",
        ),
        (
            "model.rope_fraction=0.5",
            "model.rope_fraction=0.5 has no effect with model.positions=learned",
            "model.positions=rotary, or model.rope_fraction=1.0",
        ),
        (
            "model.rope_scaling.kind=linear model.rope_scaling.factor=2",
            "model.rope_scaling=linear has no effect with model.positions=learned",
            "model.positions=rotary, or model.rope_scaling=null",
        ),
        (
            "model.positions=rotary model.rope_fraction=0.4",
            "model.rope_fraction=0.4 rotates 3 of the 8 features of a head, but features are rotated in pairs",
            "model.rope_fraction=0.25 or 0.5",
        ),
        (
            f"model.positions=rotary model.rope_fraction=0.3 {DYNAMIC}",
            "model.rope_fraction=0.3 rotates 2 of the 8 features of a head, with model.rope_scaling=dynamic, which "
            "needs at least 4",
            "model.rope_fraction=1.0",
        ),
        (
            f"model.positions=rotary model.rope_theta=1.0 {YARN}",
            "model.rope_theta=1.0 with model.positions=rotary and model.rope_scaling=yarn, which takes its logarithm",
            "model.rope_theta=10000.0",
        ),
        (
            "parallel.secondary=within_host parallel.zero=2",
            "parallel.secondary=within_host with parallel.zero=2: only ZeRO-3 gathers layers more than once",
            "parallel.zero=3, or parallel.secondary=none",
        ),
        (
            "parallel.secondary=within_host parallel.zero=3 parallel.reduce_once=true",
            "parallel.secondary=within_host with parallel.reduce_once=true: layers are gathered once per step in any "
            "case",
            "parallel.reduce_once=false, or parallel.secondary=none",
        ),
        (
            "parallel.secondary=within_host parallel.zero=3 model.share_layers=true",
            "parallel.secondary=within_host with model.share_layers=true: a single layer is gathered once per step",
            "parallel.secondary=none",
        ),
        (
            "parallel.secondary=within_host parallel.zero=3 parallel.partitioner=types",
            "parallel.secondary=within_host with parallel.partitioner=types: XLA inserts the gathers",
            "parallel.partitioner=auto, or parallel.secondary=none",
        ),
        (
            "parallel.quantize_gather=int8 parallel.zero=2",
            "parallel.quantize_gather=int8 with parallel.zero=2: only ZeRO-3 gathers layer by layer",
            "parallel.zero=3, or parallel.quantize_gather=none",
        ),
        (
            "parallel.quantize_gather=int8 parallel.zero=3 parallel.partitioner=types",
            "parallel.quantize_gather=int8 with parallel.partitioner=types: XLA inserts the gathers, and sends numbers "
            "as they are",
            "parallel.partitioner=auto, or parallel.quantize_gather=none",
        ),
        (
            "parallel.quantize_scatter=int4 parallel.zero=1",
            "parallel.quantize_scatter=int4 with parallel.zero=1: they are of ZeRO-3, beside coded weights",
            "parallel.zero=3, or parallel.quantize_scatter=none",
        ),
        (
            "parallel.prefetch=on",
            "parallel.prefetch=on with parallel.zero=0: only ZeRO-3 gathers layer by layer",
            "parallel.zero=3, or parallel.prefetch=auto",
        ),
        (
            "parallel.prefetch=on parallel.zero=3 model.scan=false",
            "parallel.prefetch=on with model.scan=false: there is no loop over layers",
            "model.scan=true, or parallel.prefetch=auto",
        ),
        (
            "parallel.prefetch=on parallel.zero=3 model.layers=2 parallel.pipe=2",
            "parallel.prefetch=on with model.layers=2: no layer runs before another one in a loop",
            "more layers, or fewer stages, or parallel.prefetch=auto",
        ),
        (
            "parallel.prefetch=on parallel.zero=3 model.layers=8 parallel.pipe=2 parallel.microbatches=2 "
            "parallel.schedule=breadth_first",
            "parallel.prefetch=on with parallel.chunks=1: there is no next chunk to gather",
            "parallel.chunks=2, or parallel.prefetch=auto",
        ),
        (
            "parallel.prefetch=on parallel.zero=3 model.layers=8 parallel.pipe=2 parallel.microbatches=2 "
            "parallel.schedule=breadth_first parallel.chunks=2 parallel.run_idle_stages=true",
            "parallel.prefetch=on with parallel.run_idle_stages=true: a chunk's last microbatch would run twice",
            "parallel.run_idle_stages=false, or parallel.prefetch=auto",
        ),
        (
            "parallel.collective_matmul=on",
            "parallel.collective_matmul=on with parallel.model=1: no product needs another device's shards",
            "parallel.model=2, or parallel.collective_matmul=auto",
        ),
        (
            "parallel.collective_matmul=on parallel.model=2 parallel.partitioner=types",
            "parallel.collective_matmul=on with parallel.partitioner=types: XLA inserts the collectives",
            "parallel.partitioner=manual, or parallel.collective_matmul=auto",
        ),
        (
            "parallel.collective_matmul=on parallel.model=2 parallel.pipe=2",
            "parallel.collective_matmul=on with parallel.pipe=2: a permute would wait for stages that take another "
            "branch",
            "parallel.run_idle_stages=true, or parallel.collective_matmul=auto",
        ),
        (
            "parallel.collective_matmul=on parallel.model=4 model.context=66",
            "parallel.collective_matmul=on with model.context=66: parallel.model=4 does not divide it",
            "model.context=64 or 68, or parallel.collective_matmul=auto",
        ),
        (
            "parallel.microbatches=3",
            "train.batch=16 is not divisible by parallel.microbatches=3",
            "parallel.microbatches=2 or 4, or train.batch=15 or 18",
        ),
        (
            "parallel.data=0",
            "parallel.data=0 is not a number of devices",
            "parallel.data=-1 for all that the other axes leave",
        ),
        (
            "model.vocab=100",
            "model.vocab=100 is less than the 256 tokens of data.tokenizer=bytes",
            "model.vocab=256",
        ),
        (
            f"{MASKED} model.vocab=259",
            "model.vocab=259 is less than the 260 tokens of data.tokenizer=bytes, with the four special "
            "tokens of objective.kind=masked_lm",
            "model.vocab=260",
        ),
        (
            f"{MASKED} model.kind=gpt",
            "objective.kind=masked_lm with model.kind=gpt, whose attention sees only earlier tokens",
            "model.kind=bert, or objective.kind=causal_lm",
        ),
        (
            "model.kind=bert",
            "objective.kind=causal_lm with model.kind=bert, whose attention sees the tokens that it has to predict",
            "model.kind=gpt, or objective.kind=masked_lm",
        ),
        (
            f"{MASKED} data.source=synthetic",
            "objective.kind=masked_lm with data.source=synthetic: a Markov chain has no words to mask",
            "data.source=python-stdlib, or objective.kind=causal_lm with model.kind=gpt",
        ),
        (
            f"{MASKED} model.context=7",
            "model.context=7 with objective.kind=masked_lm: [CLS] and [SEP] would leave no room for text",
            "model.context=8 or more",
        ),
        (
            f"{MASKED} model.token_types=1",
            "model.token_types=1 with objective.sentence_order=true: a row has two segments",
            "model.token_types=0 or 2, or objective.sentence_order=false",
        ),
        (
            "model.token_types=2",
            "model.token_types=2 with objective.kind=causal_lm: its rows are not divided into segments",
            "model.token_types=0",
        ),
        (
            f"{CLASSES} model.token_types=1",
            "model.token_types=1 with objective.kind=classification: a row may hold two texts",
            "model.token_types=0 or 2",
        ),
        (
            f"{CLASSES} model.context=7",
            "model.context=7 with objective.kind=classification: [CLS] and [SEP] would leave no room for text",
            "model.context=8 or more",
        ),
        (
            f"{CLASSES} model.vocab=259",
            "model.vocab=259 is less than the 260 tokens of data.tokenizer=bytes, with the four special "
            "tokens of objective.kind=classification",
            "model.vocab=260",
        ),
        (
            f"{CLASSES} model.logit_softcap=30",
            "model.logit_softcap=30.0 with objective.kind=classification, whose head has no logits of tokens",
            "model.logit_softcap=null",
        ),
        (
            f"{CLASSES} model.kind=gpt",
            "objective.kind=classification with model.kind=gpt, whose attention sees only earlier tokens",
            "model.kind=bert, or objective.kind=causal_lm",
        ),
        (
            f"{CLASSES} data.task=race",
            "data.task=race with objective.kind=classification",
            "objective.kind=multiple_choice objective.choices=4",
        ),
        (
            f"{CLASSES} data.task=squad",
            "data.task=squad with objective.kind=classification",
            "objective.kind=span",
        ),
        (
            f"{TASK} data.task=mnli objective.kind=masked_lm",
            "data.task=mnli with objective.kind=masked_lm",
            "objective.kind=classification objective.classes=3",
        ),
        (
            f"{TASK} data.task=jsonl objective.kind=span",
            "data.task=jsonl with objective.kind=span",
            "objective.kind=classification, with as many classes as there are labels",
        ),
        (
            f"{CLASSES} objective.classes=2",
            "objective.classes=2 with data.task=mnli, which has 3",
            "objective.classes=3",
        ),
        (
            f"{CLASSES} data.task=cola",
            "objective.classes=3 with data.task=cola, which has 2",
            "objective.classes=2",
        ),
        (
            f"{CHOICES} objective.choices=5 train.batch=20",
            "objective.choices=5 with data.task=race, which has 4",
            "objective.choices=4",
        ),
        (
            "model.kind=bert model.vocab=260 objective.kind=span",
            "objective.kind=span with data.source=python-stdlib, which has no labels",
            "data.source=task, with data.task, data.path and data.validation_path",
        ),
        (
            f"{CHOICES} train.batch=18",
            "train.batch=18 in parallel.microbatches=1 gives 18 rows, not divisible by objective.choices=4, the "
            "rows of one question",
            "train.batch=16 or 20",
        ),
        (
            f"{CHOICES} train.batch=20 parallel.microbatches=2",
            "train.batch=20 in parallel.microbatches=2 gives 10 rows, not divisible by objective.choices=4, the "
            "rows of one question",
            "train.batch=16 or 24",
        ),
        (
            f"{MASKED} objective.mask_prob=0",
            "objective.mask_prob=0.0 masks nothing, so nothing is learned",
            "objective.mask_prob=0.15",
        ),
        (
            f"{MASKED} objective.mask_prob=0.7",
            "objective.mask_prob=0.7 with objective.max_span=3: spans of 1.6 words on average, with at least one "
            "word between them, mask at most 62%",
            "objective.mask_prob=0.62 or less",
        ),
        (
            "data.source=synthetic model.vocab=3",
            "data.branching=4 is more than model.vocab=3",
            "data.branching=3",
        ),
        (
            "optim.min_lr=0.1",
            "optim.min_lr=0.1 is more than optim.lr=0.001",
            "optim.min_lr=0.0001 or less",
        ),
        (
            "optim.warmup=30 optim.decay_steps=null",
            "optim.warmup=30 is longer than train.steps=20, where the decay ends",
            "optim.warmup=2, or optim.decay_steps=300",
        ),
        (
            "train.profile.steps=[1,30]",
            "train.profile.steps=[1, 30] are not two steps from 2 to train.steps=20, in order",
            "train.profile={steps: [2, 20]}",
        ),
        (
            "optim.warmup=8 optim.decay_steps=7",
            "optim.warmup=8 is longer than optim.decay_steps=7, where the decay ends",
            "optim.warmup=0, or optim.decay_steps=80",
        ),
        (
            "optim.decay_start=30",
            "optim.decay_start=30 is not between optim.warmup=5 and optim.decay_steps=20, where the decay ends",
            "optim.decay_start=16",
        ),
        (
            "optim.decay_start=1 optim.decay_steps=null",
            "optim.decay_start=1 is not between optim.warmup=5 and train.steps=20, where the decay ends",
            "optim.decay_start=16",
        ),
        (
            "optim.decay_start=9 optim.decay=constant",
            "optim.decay_start=9 has no effect with optim.decay=constant",
            "optim.decay=linear, or optim.decay_start=null",
        ),
        (
            "precision.compute=float64",
            "precision.params=float32 is narrower than precision.compute=float64",
            "precision.params=float64, or precision.compute=float32",
        ),
        (
            "precision.params=bfloat16",
            "precision.params=bfloat16 is not supported: the optimizer's moments and accumulated gradients "
            "would be 16-bit",
            "precision.params=float32",
        ),
        (
            "precision.params=float16 precision.compute=bfloat16",
            "precision.params=float16 is not supported: the optimizer's moments and accumulated gradients "
            "would be 16-bit",
            "precision.params=float32",
        ),
        (
            "model.attention=cudnn model.attention_dropout=0",
            "model.attention=cudnn with precision.compute=float32: cuDNN takes bfloat16 or float16",
            "precision.compute=bfloat16, or model.attention=chunked",
        ),
        (
            f"{CUDNN} model.width=1024 model.heads=4",
            "model.attention=cudnn with model.width=1024 and model.heads=4: heads are 256 wide, "
            "and cuDNN takes multiples of 8 up to 128",
            "model.heads=8 or 16, or model.attention=chunked",
        ),
        (
            f"{CUDNN} model.width=96 model.heads=8",
            "model.attention=cudnn with model.width=96 and model.heads=8: heads are 12 wide, "
            "and cuDNN takes multiples of 8 up to 128",
            "model.heads=4 or 6, or model.attention=chunked",
        ),
        (
            f"{CUDNN} model.width=60 model.heads=4",
            "model.attention=cudnn with model.width=60 and model.heads=4: heads are 15 wide, "
            "and cuDNN takes multiples of 8 up to 128",
            "model.attention=chunked",
        ),
        (
            "model.attention=splash model.attention_dropout=0 model.context=200",
            "model.attention=splash with model.context=200: splash takes multiples of 128 positions",
            "model.context=128 or 256, or model.attention=chunked",
        ),
        (
            "model.attention=splash model.context=128",
            "model.attention=splash with model.attention_dropout=0.1: fused kernels have no dropout that is the "
            "same under every layout",
            "model.attention_dropout=0, or model.attention=chunked",
        ),
        (
            "parallel.pipe=3",
            "model.layers=4 is not divisible by parallel.pipe=3",
            "parallel.pipe=2 or 4, or model.layers=3 or 6",
        ),
        (
            "parallel.pipe=2 parallel.chunks=3 parallel.schedule=interleaved parallel.microbatches=2",
            "model.layers=4 is not divisible by parallel.pipe=2 x parallel.chunks=3",
            "parallel.chunks=1 or 2, or parallel.pipe=1, or model.layers=6",
        ),
        (
            "parallel.pipe=3 parallel.chunks=2 parallel.schedule=breadth_first parallel.microbatches=4",
            "model.layers=4 is not divisible by parallel.pipe=3 x parallel.chunks=2",
            "parallel.pipe=1, or model.layers=6",
        ),
        (
            "parallel.pipe=3 parallel.chunks=8 parallel.schedule=breadth_first parallel.microbatches=4",
            "model.layers=4 is not divisible by parallel.pipe=3 x parallel.chunks=8",
            "parallel.pipe=1, or model.layers=24",
        ),
        (
            "parallel.pipe=2 parallel.chunks=2",
            "parallel.schedule=1f1b with parallel.chunks=2: this schedule has one chunk per stage; "
            "parallel.schedule=interleaved has several",
            "parallel.chunks=1, or parallel.schedule=interleaved parallel.microbatches=2",
        ),
        (
            "parallel.pipe=2 parallel.chunks=2 parallel.schedule=gpipe",
            "parallel.schedule=gpipe with parallel.chunks=2: this schedule has one chunk per stage; "
            "parallel.schedule=breadth_first has several",
            "parallel.chunks=1, or parallel.schedule=breadth_first parallel.microbatches=2",
        ),
        (
            "parallel.pipe=2 parallel.chunks=2 parallel.schedule=interleaved parallel.microbatches=5 train.batch=30",
            "parallel.schedule=interleaved with parallel.microbatches=5 and parallel.pipe=2: microbatches run in "
            "groups of as many as there are stages",
            "parallel.microbatches=2 or 6, or parallel.chunks=1",
        ),
        (
            "parallel.pipe=2 parallel.chunks=2 parallel.schedule=breadth_first parallel.microbatches=1",
            "parallel.schedule=breadth_first with parallel.microbatches=1 and parallel.pipe=2: a stage would reach "
            "its next chunk before that chunk's input",
            "parallel.microbatches=2 or 4, or parallel.chunks=1",
        ),
        (
            "parallel.pipe=2 parallel.chunks=2 parallel.schedule=interleaved parallel.microbatches=3 train.batch=15",
            "parallel.schedule=interleaved with parallel.microbatches=3 and parallel.pipe=2: microbatches run in "
            "groups of as many as there are stages",
            "parallel.chunks=1",
        ),
        (
            "parallel.pipe=4 model.layers=6 run.simulate_devices=8 parallel.microbatches=2",
            "model.layers=6 is not divisible by parallel.pipe=4",
            "parallel.pipe=1 or 2, or model.layers=4 or 8",
        ),
        (
            "precision.loss_scale=dynamic precision.compute=bfloat16",
            "precision.loss_scale=dynamic with precision.compute=bfloat16: only float16 has so small a range that "
            "it needs loss scaling",
            "precision.loss_scale=none, or precision.compute=float16",
        ),
        (
            "precision.compute=float16",
            "precision.compute=float16 with precision.loss_scale=none: gradients below 6e-8 would underflow to zero",
            "precision.loss_scale=dynamic, or precision.compute=bfloat16",
        ),
        (
            f"{FLOAT16} precision.initial_scale=0.5",
            "precision.initial_scale=0.5 is less than precision.min_scale=1",
            "precision.initial_scale=1, or precision.min_scale=0.5",
        ),
        (
            f"{FLOAT16} precision.reduce=float16",
            "precision.reduce=float16 is not supported: a sum of gradients can overflow where no single gradient does",
            "precision.reduce=float32",
        ),
    ],
)
def test_conflicting_sections_are_reported_with_the_nearest_valid_settings(overrides, what, use):
    assert problems(*overrides.split()) == [f"{what}. Use {use}."]


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("data.path=[]", "data.path=[]"),
        ("data.path=''", "data.path="),
        ("data.path=[a,'']", "data.path=['a', '']"),
        ("data.validation_path=[]", "data.validation_path=[]"),
    ],
)
def test_empty_paths_are_refused(override, setting):
    key = override.partition("=")[0]
    assert problems(*CLASSES.split(), override) == [
        f"{setting} names no file. Give a file, a directory or a pattern: {key}='corpus/*.txt'."
    ]


def test_sequence_parallelism_must_divide_the_context():
    assert problems("parallel.sequence=true", "parallel.model=8", "model.context=60", "run.simulate_devices=8") == [
        "model.context=60 is not divisible by parallel.model=8, over which parallel.sequence=true shards it. "
        "Use parallel.model=2 or 4, or model.context=56 or 64."
    ]


def test_a_deterministic_run_is_refused_what_would_not_be():
    assert problems(*CUDNN.split(), "run.deterministic=true") == [
        "model.attention=cudnn with run.deterministic=true: cuDNN's attention ends in its first step where XLA's "
        "operations are deterministic (jax 0.11.2). Use run.deterministic=false, or model.attention=chunked."
    ]
    own = "run.compiler_options={xla_gpu_deterministic_ops: false}"
    assert problems("run.deterministic=true", own) == [
        "run.deterministic=true with xla_gpu_deterministic_ops=False of run.compiler_options. Use "
        "run.deterministic=false, or run.compiler_options without it."
    ]
    same = "run.compiler_options={xla_gpu_deterministic_ops: true}"
    assert not problems("run.deterministic=true", same) + problems(own)


@pytest.mark.parametrize(
    "overrides",
    [
        "parallel.zero=1",  # on one device, which is valid
        "parallel.sequence=true model.context=63",  # over one device of `model` nothing is sharded
        "parallel.zero=3 parallel.data=1 parallel.reduce_once=true",
        "parallel.zero=3 run.simulate_devices=8 parallel.model=4 parallel.sequence=true",
        "optim.warmup=30 optim.decay=constant",
        "precision.params=float64 precision.compute=float32",
        f"{FLOAT16} precision.initial_scale=65536 precision.scale_window=200",
        "model.attention=splash model.attention_dropout=0 model.context=128",
        CUDNN,  # heads of 8
        f"{CUDNN} model.width=1024",  # of 128
        "data.source=synthetic model.vocab=16",
        f"{MASKED} model.token_types=2 model.context=8",
        f"{MASKED} model.token_types=1 objective.sentence_order=false objective.mask_prob=0.5 objective.max_span=1",
        CLASSES,
        f"{CLASSES} model.token_types=2 model.context=8",
        f"{CLASSES} data.task=jsonl objective.classes=7",
        f"{CHOICES} train.batch=24 parallel.microbatches=3 run.simulate_devices=2",
        f"{TASK} data.task=squad objective.kind=span objective.doc_stride=1000",  # longer than a row
        "data.tokenizer=vocab.txt model.vocab=100",  # a vocabulary file is read later
        "run.simulate_devices=8 parallel.model=2 parallel.replica=2 parallel.microbatches=4",
        "parallel.pipe=2 parallel.microbatches=3 train.batch=18",
        "parallel.pipe=4 parallel.schedule=gpipe parallel.microbatches=2 parallel.zero=3",
        "parallel.pipe=2 parallel.chunks=2 parallel.schedule=interleaved parallel.microbatches=4",
        "parallel.chunks=3",  # one stage ignores chunks
        "parallel.pipe=2 parallel.chunks=2 parallel.schedule=breadth_first parallel.microbatches=8 "
        "parallel.run_idle_stages=true",
    ],
)
def test_valid_configurations_pass(overrides):
    assert problems(*overrides.split()) == []


@pytest.mark.parametrize(
    ("devices", "overrides", "what", "use"),
    [
        (
            8,
            "parallel.model=4 parallel.data=4",
            "parallel.data=4 x parallel.model=4 makes 16 devices, but there are 8; every device must be used",
            "parallel.data=2 or -1, or parallel.model=2",
        ),
        (
            8,
            "parallel.data=1",
            "parallel.data=1 makes 1 devices, but there are 8; every device must be used",
            "parallel.data=8 or -1",
        ),
        (  # neither degree alone would fix it
            1,
            "parallel.data=4 parallel.model=2",
            "parallel.data=4 x parallel.model=2 makes 8 devices, but there are 1; every device must be used",
            "parallel.data=1 parallel.model=1",
        ),
        (
            9,
            "parallel.data=4 parallel.model=2 parallel.replica=2",
            "parallel.replica=2 x parallel.data=4 x parallel.model=2 makes 16 devices, but there are 9; "
            "every device must be used",
            "parallel.replica=1 parallel.data=9 parallel.model=1",
        ),
        (
            9,
            "parallel.model=2 parallel.replica=2",
            "parallel.replica=2 x parallel.model=2 does not divide 9 devices; every device must be used",
            "parallel.replica=1 parallel.model=1",
        ),
        (
            6,
            "parallel.model=4",
            "parallel.model=4 does not divide 6 devices; every device must be used",
            "parallel.model=2 or 3",
        ),
        (
            8,
            "train.batch=12",
            "train.batch=12 in parallel.microbatches=1 gives 12 sequences, "
            "not divisible by parallel.replica=1 x data=8",
            "train.batch=8 or 16",
        ),
        (
            4,
            "parallel.microbatches=8",
            "train.batch=16 in parallel.microbatches=8 gives 2 sequences, not divisible by parallel.replica=1 x data=4",
            "parallel.microbatches=2 or 4, or train.batch=32",
        ),
        (
            8,
            CHOICES,
            "train.batch=16 in parallel.microbatches=1 gives 4 questions of objective.choices=4, "
            "not divisible by parallel.replica=1 x data=8",
            "train.batch=32",
        ),
        (
            2,
            f"{CHOICES} parallel.microbatches=4",
            "train.batch=16 in parallel.microbatches=4 gives 1 questions of objective.choices=4, "
            "not divisible by parallel.replica=1 x data=2",
            "parallel.microbatches=1 or 2, or train.batch=32",
        ),
    ],
)
def test_a_layout_must_use_every_device(devices, overrides, what, use):
    message = f"{what}. Use {use}."
    assert check_devices(load(DEBUG, overrides.split()), devices) == [message]
    assert message in problems(
        *overrides.split(), f"run.simulate_devices={devices}"
    )  # at load, if the number of devices is known


@given(st.integers(1, 10**5))
@settings(max_examples=50)
def test_divisors_are_complete(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize("size", [MOST - 35, MOST - 1])  # a prime, and a number of many divisors
def test_an_absurd_size_is_refused_quickly(size):
    started = time.process_time()
    assert problems(f"model.width={size}", "model.heads=8")[0].startswith(f"model.width={size} is not divisible by ")
    assert problems(f"train.batch={size}", "parallel.microbatches=2", f"run.simulate_devices={size}")
    assert time.process_time() - started < 1  # 0.1 s; by trying every number, half a minute


degrees = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


sizes = {"heads": degrees, "model": degrees, "mlp_width": st.integers(1, 40), "batch": st.integers(1, 40)}


def overrides_for(
    heads: int, model: int, mlp_width: int, batch: int, micro: int, devices: int, choices: int
) -> list[str]:
    return [
        *(CHOICES.split() if choices == 4 else []),
        *("model.width=48", f"model.heads={heads}", f"model.mlp_width={mlp_width}", f"parallel.model={model}"),
        *(f"train.batch={batch}", f"parallel.microbatches={micro}", f"run.simulate_devices={devices}"),
    ]


@given(**sizes, micro=degrees, devices=degrees, choices=st.sampled_from([1, 4]))
def test_exactly_the_divisible_sizes_pass(heads, model, mlp_width, batch, micro, devices, choices):
    divides = devices % model == heads % model == mlp_width % model == 48 % heads == batch % (micro * choices) == 0
    divides = divides and batch // (micro * choices) % (devices // model) == 0
    assert (problems(*overrides_for(heads, model, mlp_width, batch, micro, devices, choices)) == []) == divides


@settings(max_examples=50)
@given(**sizes, micro=degrees, devices=degrees, choices=st.sampled_from([1, 4]))
def test_every_suggested_setting_fixes_its_problem(heads, model, mlp_width, batch, micro, devices, choices):
    """Suggestions are tried one at a time, whatever other problems there are."""
    given = overrides_for(heads, model, mlp_width, batch, micro, devices, choices)
    for problem in problems(*given):
        suggestions = problem.split(". Use ")[1]
        for key, values in re.findall(r"([a-z]+\.\w+)=(-?\d+(?: or -?\d+)*)", suggestions):
            for value in values.split(" or "):
                fixed = problems(*given, f"{key}={value}")
                assert kind(problem) not in map(kind, fixed), (problem, key, value)


def kind(problem: str) -> str:
    """The problem without its numbers."""
    return re.sub(r"\d+", "N", problem.split(". Use ")[0])
