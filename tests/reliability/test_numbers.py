"""Numbers on the command line that nothing could ever answer: each is refused with a sentence, at once."""

import pytest

from spmd_lm.cli import main
from spmd_lm.errors import Exit

HUGE, DIGITS = str(10**12), "9" * 5000
LINES = [
    (f"train CONFIG --seeds {3 * 10**9}", "--seeds: expected a whole number from 1 to 2,147,483,647, got '3000000000'"),
    ("train CONFIG --seeds 10001 train.eval_every=1", "--seeds 10001: at most 10,000"),
    (f"train CONFIG --seeds {DIGITS}", "--seeds: expected a whole number"),
    ("train CONFIG --devices 520 train.batch=520", "run.simulate_devices=520: a process simulates at most 512"),
    (f"bench CONFIG --steps {HUGE}", "from 1 to 1,000,000, got '1000000000000'"),
    (f"bench CONFIG --warmup {HUGE}", "from 0 to 1,000,000"),
    ("bench CONFIG --steps ٣", "from 1 to 1,000,000, got '٣'"),
    (f"generate CONFIG --tokens {HUGE}", "ask for 1 to 1,000,000"),
    ("generate CONFIG --top-k -1", "top_k=-1"),
    *((f"generate CONFIG --temperature {value}", f"temperature={float(value)}") for value in ("nan", "inf", "-1")),
    ("generate CONFIG --top-p nan", "top_p=nan"),
    (f"generate CONFIG --seed {2**32}", "use an integer from 0 to 4294967295"),
    (f"ckpt verify RUN --step {10**30}", "--step: expected a whole number"),
    (f"ckpt diff RUN@{'9' * 200} RUN", "this is not a step"),
    (f"replay RUN {10**30}", "is no step"),
    ("replay RUN ٣", "is no step"),
    (f"supervise --attempts {10**30} -- train CONFIG", "--attempts: expected a whole number"),
    (f"export RUN OUT --shard {DIGITS}GB", "expected a size"),
    ("export RUN OUT --shard 0KB", "expected a size"),
    ("audit CONFIG --topology h100:1000000x8", "8,000,000 devices, of at most 65,536"),
    (f"audit CONFIG --topology {HUGE}*v5e:16x16", "devices, of at most 65,536"),
    ("audit CONFIG --topology v5p:1000x1000x1000", "no slice of v5p is 1000 chips long"),
    (f"audit CONFIG --topology cpu:{DIGITS}", "not the form of a topology"),
    ("plan CONFIG model.width=1000000000", "model.layers=4 x model.width=1000000000 x mlp_width=4000000000: an array"),
    ("plan CONFIG model.vocab=2147483647", "model.vocab: must be at most 1073741824, got 2147483647"),
    ("plan CONFIG model.context=1000000000", "model.heads=8 x model.context=1000000000^2: an array of"),
    ("plan CONFIG parallel.microbatches=3000000000", "3000000000"),
]


@pytest.mark.parametrize("line, problem", LINES, ids=[f"{i}-{line:.30}" for i, (line, _) in enumerate(LINES)])
def test_a_number_without_an_answer_is_refused(line, problem, tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    places = {"CONFIG": "configs/debug.yaml", "RUN": str(tmp_path), "OUT": str(tmp_path / "out")}
    words = [places.get(word, word.replace("RUN@", f"{tmp_path}@")) for word in line.split(" ")]
    assert main(words) == Exit.CONFIG
    error = capsys.readouterr().err
    assert problem in error and len(error) < 500


def test_a_sweep_of_a_billion_cells_is_refused(tmp_path, capsys):
    keys = ("optim.lr", "optim.b1", "optim.b2")
    grid = "\n".join(f"  {key}: {{geomspace: [1e-4, 1e-2, 1000]}}" for key in keys)
    (tmp_path / "sweep.yaml").write_text(f"name: large\nconfig: debug.yaml\ngrid:\n{grid}\n")
    assert main(["sweep", str(tmp_path / "sweep.yaml"), "--dry-run"]) == Exit.CONFIG
    assert "1,000,000,000 cells. Vary less" in capsys.readouterr().err
