"""The shipped recipes with attention dropout, compiled for absent hardware: no array holds all scores of its rows."""

import math
import re

import pytest

from spmd_lm.config.load import load
from spmd_lm.planning.audit import AuditedStep, audit_step
from tests.planning.test_audit import compilable

pytestmark = pytest.mark.slow
ARRAY = re.compile(r"\b(?:pred|[suf]\d+|bf16)\[(\d+(?:,\d+)+)\]")  # a library's workspace has one dimension


def four_narrow_layers(recipe: str, where: str, tokens: int, *keys: str) -> AuditedStep:
    """The audited step of the recipe with four narrow layers and eight rows."""
    sizes = f"layers=4 width=128 heads=8 vocab=512 context={tokens}".split()
    layout = ["pipe=1", "data=-1", "model=1", "sequence=false", "zero=1", "microbatches=1"]
    keys = *(f"model.{key}" for key in sizes), *(f"parallel.{key}" for key in layout), "train.batch=8", *keys
    return audit_step(load(recipe, list(keys)), compilable(where))


def full_scores(recipe: str, where: str, tokens: int, *keys: str) -> set[str]:
    """Sizes of arrays as large as half of all scores of a device's rows."""
    step = four_narrow_layers(recipe, where, tokens, *keys)
    found = set(ARRAY.findall(step.program.compiled.as_text() or ""))
    rows, heads = 8 // step.program.plan.layout.batch_shards, 8
    least = rows * heads * tokens**2 / 2
    return {sizes for sizes in found if math.prod(map(int, sizes.split(","))) >= least}


@pytest.mark.parametrize("tokens", [1024, 4096])
@pytest.mark.parametrize("where", ["h100:1x8", "v5p:2x2x2"])
@pytest.mark.parametrize("recipe", ["gpt2/124m", "megatron/1.2b", "bert/megatron-336m"])
def test_no_array_has_all_scores_of_a_row(recipe, where, tokens):
    assert not full_scores(f"configs/{recipe}.yaml", where, tokens)


def test_the_dense_kernel_has_them():
    assert full_scores("configs/gpt2/124m.yaml", "h100:1x8", 1024, "model.attention=xla")


def test_temporaries_grow_with_the_row_not_its_square():
    """With eight times the tokens, on a GPU and with dropout."""
    short, long = (
        four_narrow_layers("configs/gpt2/124m.yaml", "h100:1x8", tokens).program.compiled.memory_analysis()
        for tokens in (4096, 32768)
    )
    assert long.temp_size_in_bytes < 8.8 * short.temp_size_in_bytes
