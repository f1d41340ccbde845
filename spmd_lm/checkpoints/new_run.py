"""Writes a run whose first checkpoint holds given parameters, imported or merged."""

import shutil
from contextlib import closing
from pathlib import Path

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta, new_run_id
from spmd_lm.checkpoints.record import Meta
from spmd_lm.config.load import TOKENIZER_DIR, write_config
from spmd_lm.parallel.trees import Tree
from spmd_lm.step.program import Program


def write_new_run(program: Program, params: Tree, directory: Path, meta: Meta | None = None) -> None:
    """Writes the run of `program` into `directory`: config.yaml, and a checkpoint at step 0.
    params: canonical.  meta: added to the checkpoint's own."""
    config = program.config
    meta = make_meta(config.model_dump(by_alias=True), num_samples=0, fingerprint="") | (meta or {})
    with closing(Checkpointer(directory / "checkpoints", config.checkpoint, new_run_id())) as checkpointer:
        checkpointer.save(0, program.saved_part(program.initial_canonical(params)), meta)
    write_config(config, directory)


def copy_tokenizer(run: Path, directory: Path) -> None:
    """Copies a run's tokenizer, if it has one."""
    if (run / TOKENIZER_DIR).is_dir():
        shutil.copytree(run / TOKENIZER_DIR, directory / TOKENIZER_DIR)
