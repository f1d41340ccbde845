import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.config import syntax


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("2.", 2.0),
        (".inf", math.inf),
        ("010", 10),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("2024-01-02", "2024-01-02"),
        ("~", None),
        ("", None),
        ("'3'", "3"),
        ("{no: on}", {"no": "on"}),
    ],
)
def test_scalars_follow_the_core_schema(text, value):
    read, problems = syntax.read(text)
    assert (read, type(read), problems) == (value, type(value), [])


def test_all_duplicate_keys_are_reported_with_both_lines():
    value, problems = syntax.read("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n")
    assert value == {"a": 3, "b": {"c": 2}}
    assert problems == [
        "line 5: duplicate key 'a', first on line 1. Remove one",
        "line 4: duplicate key 'c', first on line 3. Remove one",
    ]


def test_what_stands_twice_is_written_twice():
    shared = ["a"]
    assert syntax.write({"a": shared, "b": shared}) == "a:\n- a\nb:\n- a\n"


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "a: b: c",
        "\ta: 1",
        "a: *b",
        "a: 1\n---\nb: 2",
        "!!python/name:os.system x",
        "a: \x00",
    ],
)
def test_invalid_yaml_is_reported_and_not_raised(text):
    value, problems = syntax.read(text)
    assert value is None and len(problems) == 1 and "not YAML: " in problems[0]


@pytest.mark.parametrize("text", ["!!int twelve", "!!bool maybe", "a: !!timestamp x"])
def test_a_tag_that_does_not_fit_its_value_is_reported(text):
    fits_not = "a tag does not fit its value, as in `!!int twelve`. Remove the tag, or correct the value"
    assert syntax.read(text) == (None, [fits_not])


def test_an_alias_inside_its_own_anchor_is_an_error():
    assert syntax.read("a: &x {b: *x}")[1]


scalars = st.none() | st.booleans() | st.integers(1 - 10**18, 10**18 - 1) | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(), scalars | st.lists(scalars) | st.dictionaries(st.text(), scalars)))
def test_what_is_written_reads_back_equal(tree):
    read, problems = syntax.read(syntax.write(tree))
    assert read == tree and not problems


@pytest.mark.parametrize("text", ["3e-4", "no", "010", "1:30", "1_000", "true", "null", "~", "2024-01-02"])
def test_text_that_looks_like_another_type_stays_text(text):
    assert syntax.read(syntax.write({"name": text})) == ({"name": text}, [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "a: 1\nb: 1234567890123456789",
            "line 2: a whole number of 19 digits; at most 18 fit. Quote it if it is text",
        ),
        ("-" + "9" * 5000, "line 1: a whole number of 5000 digits; at most 18 fit. Quote it if it is text"),
        ("[" * 3000, "nested too deeply. A value is a scalar or a list of scalars"),
        ("{a: " * 3000 + "1" + "}" * 3000, "nested too deeply. A value is a scalar or a list of scalars"),
    ],
)
def test_values_that_no_key_takes_are_refused(text, problem):
    assert syntax.read(text) == (None, [problem])


def test_the_longest_whole_number():
    assert syntax.read("-" + "0" * 30 + "9" * 18) == (-(10**18 - 1), [])
