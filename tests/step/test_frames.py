"""How deep the step is: the frames of this package from the train step's body to the products of attention."""

import jax
import pytest

import spmd_lm
from spmd_lm.ops import attention
from tests.helpers import make_config, program

MOST_FRAMES = 14
PACKAGE = spmd_lm.__path__[0]


def frames_to_attention(jaxpr) -> list[list[str]]:
    """For each dot_general of ops/attention.py, `file:function` of the package's frames that led to it, innermost
    first, up to the body of the train step."""
    found = []
    for equation in equations(jaxpr):
        if equation.primitive.name != "dot_general" or equation.source_info.traceback is None:
            continue
        frames = [frame for frame in equation.source_info.traceback.frames if frame.file_name.startswith(PACKAGE)]
        names = [f"{frame.file_name.removeprefix(PACKAGE)}:{frame.function_name}" for frame in frames]
        if frames and frames[0].file_name == attention.__file__:
            body = next(i for i, name in enumerate(names) if name == "/step/train_step.py:train_step")
            found.append(names[: body + 1])
    return found


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("scan", [True, False])
def test_the_step_is_shallow(scan, microbatches, remat):
    model = {"scan": scan, "dropout": 0.1, "attention_dropout": 0.1}
    precision = dict.fromkeys(("params", "compute", "reduce"), "float32")
    parallel = {"microbatches": microbatches}
    p = program(make_config(model=model, precision=precision, parallel=parallel, remat={"policy": remat}))
    traced = p.train_step.trace(p.abstract_state(), p.abstract_batch())
    paths = frames_to_attention(traced.jaxpr.jaxpr)
    assert paths and max(map(len, paths)) <= MOST_FRAMES, max(paths, key=len)
    if remat == "none":
        deepest = max(paths, key=len)
        assert not [name for name in deepest if "lambda" in name]
