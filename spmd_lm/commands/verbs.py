"""The verbs of the command `spmd-lm`, in the order in which --help lists them."""

from spmd_lm.commands import audit, bench, config, evaluate, export_hf, generate, import_hf, plan, train
from spmd_lm.commands.common import Verb

VERBS: dict[str, Verb] = {
    "train": train.VERB,
    "eval": evaluate.VERB,
    "generate": generate.VERB,
    "plan": plan.VERB,
    "audit": audit.VERB,
    "bench": bench.VERB,
    "import": import_hf.VERB,
    "export": export_hf.VERB,
    "config": config.VERB,
}
