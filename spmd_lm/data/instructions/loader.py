"""Rows of conversations: one per row, or as many as fit.

Packing is best fit decreasing: the longest conversation first, each into the fullest row with room for it.  Packing
depends on lengths alone, so an epoch is a fixed set of rows, shuffled by `Loader`."""

import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.data_sections import packs_documents
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.instructions.dataset import InstructionDataset
from spmd_lm.data.loader import Loader, SampleIndices, SplitName
from spmd_lm.errors import ConfigError


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Indices of the conversations in each row; none is longer than a row's capacity."""
    packed: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit n: some row has exactly n positions left
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            rooms ^= 0 if rows_by_room[room] else 1 << room
        else:
            room, row = capacity, len(packed)
            packed.append([])
        packed[row].append(index)
        if left := room - length:
            rows_by_room[left].append(row)
            rooms |= 1 << left
    return packed


class InstructionLoader(Loader):
    """Rows whose targets are the next tokens, with weight 0 outside answers.  A conversation's last token is only a
    target, so N tokens take N - 1 positions, from 0 on.  Raises ConfigError if there is no validation data."""

    def __init__(self, dataset: InstructionDataset, config: RunConfig, split: SplitName):
        conversations = dataset.train if split == "training" else dataset.validation
        if conversations is None:
            raise ConfigError("data.source=instructions: nothing to validate on. Set data.validation_path.")
        self.conversations, lengths = conversations, np.diff(conversations.bounds) - 1
        is_packed = packs_documents(config.data)
        self.packed = pack_best_fit(lengths, config.model.context) if is_packed else [[n] for n in range(len(lengths))]
        super().__init__(config, split, len(self.packed))

    def read(self, indices: SampleIndices) -> Batch:
        shape = len(indices.example_R), self.context
        tokens, targets, positions, segments = (np.zeros(shape, np.int32) for _ in range(4))
        weights = np.zeros(shape, np.float32)
        split = self.conversations
        for row, example in enumerate(indices.example_R.tolist()):
            column = 0
            for segment, index in enumerate(self.packed[example], start=1):
                first, last = split.bounds[index], split.bounds[index + 1] - 1
                here = row, slice(column, column + last - first)
                tokens[here], targets[here] = split.tokens[first:last], split.tokens[first + 1 : last + 1]
                weights[here] = split.is_answer[first + 1 : last + 1]
                positions[here], segments[here] = np.arange(last - first), segment
                column += last - first
        return Batch(
            tokens=tokens,
            targets=targets,
            loss_weights=weights * indices.valid_R[:, None],
            positions=positions,
            segments=segments,
            sample_ids=indices.sample_ids_R.astype(np.int32),
        )
