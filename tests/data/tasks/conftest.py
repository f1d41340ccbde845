"""Files of every kind of task, for the tests of several modules."""

import random

import pytest

from tests.task_files import WRITERS


@pytest.fixture(scope="session", params=WRITERS)
def task(request):
    return request.param


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """TASK/train.jsonl with 37 examples and TASK/dev.jsonl with 21."""
    top = tmp_path_factory.mktemp("tasks")
    for name, write in WRITERS.items():
        (top / name).mkdir()
        write(top / name / "train.jsonl", random.Random(0), 37)
        write(top / name / "dev.jsonl", random.Random(1), 21)
    return top
