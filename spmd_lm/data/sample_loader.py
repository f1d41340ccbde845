"""Rows from the user's own function: sample n of a stream, a pure function of n."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmd_lm.batch import Batch, abstract_batch
from spmd_lm.config.data_sections import CustomData
from spmd_lm.config.own_modules import ModuleRef
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.loader import Loader, SampleIndices, SplitName
from spmd_lm.data.tokenizers.tokenizer import Tokenizer
from spmd_lm.errors import DataError
from spmd_lm.own_module import line_in, load_object


@dataclasses.dataclass(frozen=True)
class SampleDataset:
    """The samples of a function: the first `validation_samples` for validation, the rest for training."""

    data: CustomData
    tokenizer: Tokenizer

    @functools.cached_property
    def sample(self) -> Callable[[int], Any]:
        return load_object(self.data.module)

    @property
    def name(self) -> str:
        ref = ModuleRef.parse(self.data.module)
        return f"{ref.path}:{ref.name}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the function's file, its name and the number of held-out samples, in hex."""
        _, name, hash_ = ModuleRef.parse(self.data.module)
        return hashlib.sha256(f"{hash_} {name} {self.data.validation_samples}".encode()).hexdigest()

    def describe(self) -> str:
        held_out = f"samples from {self.data.validation_samples:,} on, those before them for validation"
        return f"{self.name}: {held_out}, sha256 {self.fingerprint[:12]}"


class SampleLoader(Loader):
    """Rows in order of n; training never ends.  A sample is model.context + 1 token ids, or a mapping of one row's
    Batch fields.  By default positions count from 0, and segments and weights are 1."""

    def __init__(self, dataset: SampleDataset, config: RunConfig, split: SplitName):
        super().__init__(config, split, dataset.data.validation_samples)
        self.dataset, self.objective = dataset, config.objective
        leaves = vars(abstract_batch(config)).items()
        self.fields = {name: leaf for name, leaf in leaves if leaf is not None and name != "sample_ids"}
        vocab = config.model.vocab
        self.bounds = {"tokens": vocab, "targets": vocab, "positions": self.context}
        self.bounds["token_type_ids"] = config.model.token_types

    def read_examples(self, index_R: np.ndarray, sample_ids_R: np.ndarray) -> Batch:
        if self.split == "validation":
            return super().read_examples(index_R, sample_ids_R)
        return self.read(SampleIndices(sample_ids_R, self.num_examples + index_R, None, np.ones(len(index_R), bool)))

    def read(self, indices: SampleIndices) -> Batch:
        rows = [self._row(n) for n in indices.example_R.tolist()]
        fields: dict[str, Any] = dict.fromkeys(Batch.__dataclass_fields__)
        for name, leaf in self.fields.items():
            shape = len(rows), *leaf.shape[2:]
            fields[name] = np.array([row[name] for row in rows], leaf.dtype).reshape(shape)
            if name.endswith("weights"):
                fields[name] *= indices.valid_R.reshape(-1, *(1,) * (len(shape) - 1))
        return Batch(**fields | {"sample_ids": indices.sample_ids_R.astype(np.int32)})

    def _row(self, n: int) -> dict[str, np.ndarray]:
        """The fields of sample n.  Raises DataError if the function fails, or returns something else."""
        where = f"{self.dataset.name}({n})"
        try:
            made = self.dataset.sample(n)
        except Exception as error:
            path = ModuleRef.parse(self.dataset.data.module).path
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{where}{line_in(path, error)}: {reason}. Correct that function.") from error
        if not isinstance(made, Mapping):
            made = self._predicting_next(made, where)
        if missing := self.fields.keys() - self._defaults.keys() - made.keys():
            raise DataError(f"{where} has no {', '.join(sorted(missing))}, which the objective reads. Return them too.")
        if unknown := made.keys() - Batch.__dataclass_fields__.keys() | made.keys() & {"sample_ids"}:
            raise DataError(f"{where} has {', '.join(sorted(unknown))}, which no row has. Leave it out.")
        row = {name: np.asarray(value) for name, value in (self._defaults | dict(made)).items() if name in self.fields}
        for name, value in row.items():
            self._check(name, value, where)
        return row

    def _predicting_next(self, made: Any, where: str) -> dict[str, np.ndarray]:
        """Fields of a row of token ids, with the next tokens as targets."""
        ids = np.asarray(made)
        if self.objective.kind != "causal_lm":
            reason = f"only objective.kind=causal_lm predicts the next of, not {self.objective.kind}"
            raise DataError(f"{where} returns token ids, which {reason}. Return a mapping of a row's fields.")
        if ids.shape != (self.context + 1,):
            raise DataError(
                f"{where} has the shape {ids.shape}. Return model.context + 1 = {self.context + 1} token ids, or a "
                "mapping of a row's fields."
            )
        return {"tokens": ids[:-1], "targets": ids[1:]}

    def _check(self, name: str, value: np.ndarray, where: str) -> None:
        leaf = self.fields[name]
        if value.shape != leaf.shape[2:]:
            raise DataError(f"{where}: {name} has the shape {value.shape}, not {leaf.shape[2:]}. Return one row.")
        if leaf.dtype == np.int32 and value.dtype.kind not in "iub":
            raise DataError(f"{where}: {name} are {value.dtype}. Return whole numbers.")
        if leaf.dtype != np.int32 and not np.isfinite(value).all():
            raise DataError(f"{where}: {name} are not all finite. Return finite numbers.")
        if (bound := self.bounds.get(name)) and not (value.min() >= 0 and value.max() < bound):
            raise DataError(
                f"{where}: {name} are from {value.min()} to {value.max()}. Return some from 0 to {bound - 1}."
            )

    @functools.cached_property
    def _defaults(self) -> dict[str, np.ndarray]:
        ones = np.ones(self.context, np.int32)
        whole_row: dict[str, np.ndarray] = {
            "positions": np.arange(self.context),
            "segments": ones,
            "token_type_ids": 0 * ones,
        }
        return whole_row | {"loss_weights": ones, "label_weights": np.ones((), np.int32)}
