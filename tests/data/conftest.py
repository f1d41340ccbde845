"""Files of every task, for the tests of several modules."""

import random

import pytest

from tests.labelled import WRITERS


@pytest.fixture(scope="session", params=WRITERS)
def task(request):
    return request.param


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Files of every task: 37 examples to train on and 21 to be judged by."""
    top = tmp_path_factory.mktemp("tasks")
    for name, write in WRITERS.items():
        (top / name).mkdir()
        write(top / name / "train.jsonl", random.Random(0), 37)
        write(top / name / "dev.jsonl", random.Random(1), 21)
    return top
