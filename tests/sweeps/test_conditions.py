"""A sweep's `when`: what it can express, and what it refuses."""

import pytest

from spmd_lm.errors import ConfigError
from spmd_lm.sweeps.conditions import Condition

KEYS = {"parallel.model": 4, "parallel.zero": 3, "parallel.sequence": False, "optim.lr": 1e-3, "data.source": "text"}


@pytest.mark.parametrize(
    "text, holds",
    [
        ("parallel.model == 4", True),
        ("parallel.model * 2 <= 8 and parallel.zero < 3", False),
        ("1 < parallel.model <= 4", True),
        ("not parallel.sequence or parallel.model > 8", True),
        ("parallel.zero in [0, 3]", True),
        ("parallel.zero not in (0, 3)", False),
        ("data.source == 'text' and optim.lr > 5e-4", True),
        ("parallel.model % 3 - 1 == 0 and parallel.model // 3 / 2 == 0.5 and -parallel.zero + 3 == 0", True),
        ("parallel.sequence == true", False),
        ("parallel.sequence != null", True),
    ],
)
def test_conditions_compare_keys(text, holds):
    assert Condition(text).holds(KEYS) is holds


@pytest.mark.parametrize(
    "text, problem",
    [
        ("parallel.modle > 1", "no key parallel.modle. Did you mean parallel.model?"),
        ("model > 1", "no key model"),
        ("__import__('os').system('true')", "uses '__import__"),
        ("(lambda: 1)()", "uses '"),
        ("data.source * 1000000000 == ''", "is 'text', no number"),
        ("parallel.model ** 99999999 > 1", "uses 'parallel.model ** 99999999'"),
        ("data.source < 3", "'<' not supported"),
        ("parallel.model / 0 > 1", "division by zero"),
        ("parallel.model >", "is no condition: invalid syntax"),
        ("x" * 1001, "1001 characters"),
        ("[" * 500 + "]" * 500, "is no condition"),
        ("-" * 900 + "1", "is too deep. Write several conditions."),
        ("a." * 450 + "b", "is too deep. Write several conditions."),
    ],
)
def test_anything_else_is_refused(text, problem):
    with pytest.raises(ConfigError) as error:
        Condition(text).holds(KEYS)
    assert problem in str(error.value) and str(error.value).count("when:") == 1
