"""What a zero-shot task is: it reads its items, says which tokens to score, and makes figures of their log-likelihoods.

To add a task, add a module to this package with a subclass of EvalTask that has a name; nothing lists them."""

import abc
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from spmd_lm.data.text_files import Document, read_documents
from spmd_lm.evaluation import tasks
from spmd_lm.evaluation.bootstrap import Metric, estimate
from spmd_lm.evaluation.continuations import Encoder
from spmd_lm.evaluation.scoring import Scored, Windows


class SplitText(NamedTuple):
    """tokens: [K].  num_bytes: of the documents that they are of; None if that is not known."""

    tokens: np.ndarray
    num_bytes: int | None


class TaskInput(NamedTuple):
    """path: what follows NAME= where tasks are given; '' for a task without files.  context: tokens that the model
    reads.  stride: as the user gave it; None for the task's default.  split: reads the run's own split of this name;
    DataError if it has too few tokens, or there is none."""

    path: str
    encoder: Encoder
    context: int
    stride: int | None
    split: Callable[[str], SplitText]


class TaskFigures(NamedTuple):
    """metrics, and their 95% intervals; n: what they are of; counts: what else a reader should know, by name."""

    metrics: dict[str, float]
    ci95: dict[str, list[float]]
    n: int
    counts: dict[str, int]

    @classmethod
    def of(cls, metrics: Mapping[str, Metric], n: int, **counts: int) -> "TaskFigures":
        return cls(*estimate(metrics), n, counts)

    def to_dict(self) -> dict:
        """As --json writes it."""
        return {"metrics": self.metrics, "n": self.n, **self.counts, "ci95": self.ci95}


class EvalTask(abc.ABC):
    """windows: what is to be scored.  A subclass reads its items when it is made; raises DataError."""

    name: ClassVar[str]
    takes_path: ClassVar[bool] = True
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl",)  # of the files that a directory is searched for
    slides: ClassVar[bool] = False  # whether its windows move by a stride
    windows: Windows

    @abc.abstractmethod
    def __init__(self, given: TaskInput): ...

    @abc.abstractmethod
    def figures(self, scored: Scored) -> TaskFigures:
        """scored: of `windows`."""

    @classmethod
    def documents(cls, given: TaskInput) -> list[Document]:
        """The files that `path`, a file, glob or directory, names."""
        return read_documents([given.path], cls.name, cls.suffixes)


def find_tasks() -> dict[str, type[EvalTask]]:
    """All tasks by name, in alphabetical order."""

    def subclasses(parent: type[Any]) -> list[type[EvalTask]]:
        return [each for child in parent.__subclasses__() for each in (child, *subclasses(child))]

    for module in pkgutil.iter_modules(tasks.__path__):
        importlib.import_module(f"{tasks.__name__}.{module.name}")
    found = {each.name: each for each in subclasses(EvalTask) if "name" in vars(each)}
    return dict(sorted(found.items()))
