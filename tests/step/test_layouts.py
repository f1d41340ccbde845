"""Layouts and sizes drawn at random: whatever is legal computes the reference, in float64."""

import math
import random
from collections.abc import Callable, Sequence

import pytest

from spmd_lm import resolve
from spmd_lm.axes import MESH_AXES
from spmd_lm.config.adapters import NoAdapter
from spmd_lm.config.checks import problems
from spmd_lm.config.layout_checks import check_devices
from spmd_lm.config.overlap import collective_matmul_obstacles
from spmd_lm.config.schema import Model, Parallel, Precision, RunConfig
from tests.helpers import ORIGINAL_BERT, alone, assert_same_run, make_config, program, trained, trained_reference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64")]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Cuts rows of a few tokens into several blocks."""
    monkeypatch.setattr(resolve, "attention_block", lambda platform: 4)


OBJECTIVES = {
    "causal": ({}, {}),
    "packed": ({}, {"data": {"source": "tokens", "path": "never opened", "pack": True}}),
    "masked": (
        ORIGINAL_BERT,
        {
            "objective": {"kind": "masked_lm", "sentence_order": True},
            "data": {"source": "python-stdlib"},  # never opened
            "optim": {"eps": 1e-6},
        },
    ),
}
"""Keys of a model, and sections."""


def draw(pick: Callable, contexts: Sequence[int], forms: Sequence[str], objective: str) -> RunConfig | None:
    """A model, and a layout of it on 2 to 8 devices; None if they do not go together.
    pick: draws one of several.  forms: of attention of shared rows."""

    def chance() -> bool:
        return pick([False, True])

    sizes, left = {}, 8
    for axis, degrees in (
        ("context", contexts),
        ("pipe", (1, 2)),
        ("expert", (1, 2, 4, 8)),
        ("replica", (1, 2)),
        ("model", (1, 2, 3, 4)),
        ("data", (1, 2, 3, 4)),
    ):
        sizes[axis] = pick([n for n in degrees if n <= left])
        left //= sizes[axis]
    shared, stages = sizes["context"] > 1, sizes["pipe"]
    heads = pick([n for n in (2, 3, 4, 6, 8) if n % sizes["model"] == 0])
    form = pick(forms)
    schedules = {"gpipe": [1], "1f1b": [1], "interleaved": [2], "breadth_first": [1, 2]}
    schedule = pick(sorted(schedules))
    chunks = pick(schedules[schedule]) if stages > 1 else 1
    time = pick([n for n in (6, 12, 15, 16) if not shared or n % (2 * sizes["context"]) == 0])

    expert_layers = pick(["none", "all", "every second"] if sizes["expert"] == 1 else ["all", "every second"])
    capacity = pick(["none", 1.0, 0.5])
    moe = {
        "kind": "moe",
        "experts": pick([n for n in (4, 8) if n % sizes["expert"] == 0]),
        "per_token": pick(range(1, 4)),
        "capacity": capacity,
        "group": None if capacity == "none" else pick([time // (2 * sizes["context"]) if shared else 3, None]),
        "renormalize": chance(),
        "shared": pick([None, heads * 2]),
    }
    moe["shared_gate"] = moe["shared"] is not None and chance()
    a_stage = stages * chunks * (2 if expert_layers == "every second" and stages > 1 else 1)
    kind, sections = OBJECTIVES[objective]
    positions = pick(["learned", "rotary"])
    model = kind | {
        "layers": pick([n for n in (1, 2, 3, 4) if n % a_stage == 0] or [a_stage]),
        "heads": heads,
        "kv_heads": pick([n for n in range(1, heads + 1) if heads % n == 0]),
        "positions": positions,
        "width": heads * pick([4, 6, 8] if positions == "rotary" else [3, 5, 8]),
        "mlp_width": heads * pick(range(2, 10)),
        "context": time,
        "vocab": pick(
            range(260, 300) if "data" in sections else range(17, 71)
        ),  # a byte tokenizer's, and special tokens
        "dropout": pick([0.0, 0.2]),
        "attention": pick(["auto", "chunked"]),
        "attention_dropout": pick([0.0, 0.1]),
        "attention_softcap": pick([None, 0.05]),
        "use_bias": chance(),
        "tie_embeddings": chance(),
        "scan": chance(),
        "mlp": moe if expert_layers == "all" else {"kind": "dense"},
        "period": ["block", {"kind": "block", "mlp": moe}] if expert_layers == "every second" else None,
    }
    by_types = not shared and stages == 1 and expert_layers == "none"
    zero = pick(range(4))
    parallel = sizes | {
        "schedule": schedule,
        "chunks": chunks,
        "run_idle_stages": (shared and form == "ring" and stages > 1) or chance(),
        "context_attention": form,
        "microbatches": pick([1, 2, 4]),
        "zero": zero,
        "sequence": chance(),
        "reduce_once": chance(),
        "prefetch": pick(["auto", "on"] if zero == 3 else ["auto"]),
        "partitioner": pick(["types", "manual"] if by_types else ["manual"]),
    }
    devices = math.prod(parallel[axis] for axis in MESH_AXES)
    if devices == 1:
        return None
    sized, laid_out = Model(**model), Parallel(**parallel)
    if not any(collective_matmul_obstacles(sized, laid_out, NoAdapter(), Precision())):
        parallel["collective_matmul"] = pick(["on", "off"])
    remat = {"policy": pick(["none", "selective", "residual", "full", "offload"])}
    optim = {"clip": pick([0.0, 0.05])} | sections.get("optim", {})
    sections = sections | {"model": model, "train": {"batch": 24}, "optim": optim}
    config = make_config(parallel=parallel, remat=remat, **sections)
    legal = not problems({name: getattr(config, name) for name in type(config).model_fields})
    return config if legal and not check_devices(config, devices) else None


BOTH = ("heads", "ring")


@pytest.mark.parametrize(
    ("contexts", "forms", "objective"),
    [
        ((1,), BOTH, "causal"),
        ((1,), BOTH, "packed"),
        ((1, 2, 4), BOTH, "masked"),
        ((2,), ("heads",), "masked"),
        ((2,), ("ring",), "causal"),
        ((4,), ("heads",), "packed"),
        ((4,), ("ring",), "masked"),
        ((8,), ("heads",), "causal"),
        ((8,), ("ring",), "packed"),
    ],
    ids=str,
)
def test_any_layout_computes_the_reference(contexts, forms, objective):
    pick = random.Random(f"{contexts}, {forms}, {objective}").choice
    config = next(filter(None, (draw(pick, contexts, forms, objective) for _ in range(10_000))))
    print(config.model_dump_json(exclude_defaults=True))
    got, want = trained(config), trained_reference(alone(config))
    for each in (program, trained, trained_reference):
        each.cache_clear()  # of what is not asked for again
    assert_same_run(got, want)
