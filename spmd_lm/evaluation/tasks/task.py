"""The interface of zero-shot tasks: read items, choose the tokens to score, and compute metrics of log-likelihoods.

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
    tokens: np.ndarray  # [K]
    num_bytes: int | None  # of the tokens' documents, if known


class TaskInput(NamedTuple):
    path: str  # after NAME=; '' for a task without files
    encoder: Encoder
    context: int  # tokens that the model reads
    stride: int | None  # from the user; None for the task's default
    split: Callable[[str], SplitText]  # reads the run's split of this name, or raises DataError


class TaskFigures(NamedTuple):
    metrics: dict[str, float]
    ci95: dict[str, list[float]]
    n: int  # items or tokens measured
    counts: dict[str, int]  # other counts for the reader

    @classmethod
    def of(cls, metrics: Mapping[str, Metric], n: int, **counts: int) -> "TaskFigures":
        return cls(*estimate(metrics), n, counts)

    def to_dict(self) -> dict:
        return {"metrics": self.metrics, "n": self.n, **self.counts, "ci95": self.ci95}


class EvalTask(abc.ABC):
    """A task reads its items when it is made, into `windows`; raises DataError."""

    name: ClassVar[str]
    takes_path: ClassVar[bool] = True
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl",)  # of files searched for in a directory
    slides: ClassVar[bool] = False  # its windows move by a stride
    windows: Windows

    @abc.abstractmethod
    def __init__(self, given: TaskInput): ...

    @abc.abstractmethod
    def figures(self, scored: Scored) -> TaskFigures: ...

    @classmethod
    def documents(cls, given: TaskInput) -> list[Document]:
        """The documents that `path`, a file, glob or directory, names."""
        return read_documents([given.path], cls.name, cls.suffixes)


def find_tasks() -> dict[str, type[EvalTask]]:
    """Task classes by name, in alphabetical order."""

    def subclasses(parent: type[Any]) -> list[type[EvalTask]]:
        return [each for child in parent.__subclasses__() for each in (child, *subclasses(child))]

    for module in pkgutil.iter_modules(tasks.__path__):
        importlib.import_module(f"{tasks.__name__}.{module.name}")
    found = {each.name: each for each in subclasses(EvalTask) if "name" in vars(each)}
    return dict(sorted(found.items()))
