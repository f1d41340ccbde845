import argparse
import dataclasses
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import spmd_lm
from spmd_lm import api
from spmd_lm.cli import VERBS, main
from spmd_lm.commands.common import write_result
from spmd_lm.config.load import dump, load
from spmd_lm.errors import CheckpointError, Exit
from spmd_lm.generation.sampling import Sampling
from spmd_lm.runtime.signals import StopSignals
from tests import processes

DEBUG = str(Path(__file__).parents[1] / "configs" / "debug.yaml")


@pytest.fixture
def work(monkeypatch):
    """Replaces the function that a verb imports and runs by a fake, and returns the list of its calls."""
    calls = []

    def work(module: str, name: str, result, **others):
        def fake(*arguments):
            calls.append(arguments)
            if isinstance(result, BaseException):
                raise result
            return result(*arguments) if callable(result) else result

        fake_module = types.ModuleType(module)
        vars(fake_module).update({name: fake, **others})
        monkeypatch.setitem(sys.modules, module, fake_module)
        return calls

    return work


def errors(capsys) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_config_prints_yaml_that_loads_equal(capsys, tmp_path):
    assert main(["config", DEBUG, "train.steps=7"]) == 0
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    assert load(path) == load(DEBUG, ["train.steps=7"])


def test_options_and_overrides_come_in_any_order(capsys):
    assert main(["config", "--devices", "16", DEBUG, "train.steps=7", "--json", "-", "model.heads=4"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert (config["run"]["simulate_devices"], config["train"]["steps"], config["model"]["heads"]) == (16, 7, 4)
    assert config["checkpoint"]["async"] is True


def test_json_goes_to_a_file_and_text_to_standard_output(capsys, tmp_path, work):
    calls = work("spmd_lm.planning.plan_report", "describe", {"devices": 8}, render=str)
    assert main(["plan", DEBUG, "--json", str(tmp_path / "plan.json")]) == 0
    assert json.loads((tmp_path / "plan.json").read_text()) == {"devices": 8}
    assert capsys.readouterr().out == "{'devices': 8}\n"
    assert main(["plan", DEBUG, "--json", str(tmp_path / "missing" / "plan.json")]) == Exit.CONFIG
    assert len(calls) == 1  # refused before the work
    assert "cannot be written" in errors(capsys)[0]


@pytest.mark.parametrize(
    ("line", "option"),
    [(["plan"], "--json"), (["plan", "--search", "--topology", "v4:2x2x1"], "--out"), (["bench"], "--calibrate")],
)
def test_an_override_is_not_taken_for_a_file(line, option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    verb, *options = line
    assert main([verb, DEBUG, *options, option, "run.simulate_devices=2"]) == Exit.CONFIG
    told = f"error: {option} run.simulate_devices=2: that is an override, not a file. Name the file first."
    assert errors(capsys) == [told] and not [*tmp_path.iterdir()]


def test_plan_initializes_no_devices(tmp_path):
    """Any number of devices can be planned for."""
    program = (
        "import sys; from spmd_lm.cli import main; code = main(sys.argv[1:]); from jax._src import xla_bridge; "
        "sys.exit(code or xla_bridge.backends_are_initialized())"
    )
    line = ["plan", DEBUG, "--devices", "5000", "train.batch=5000", "--json", str(tmp_path / "plan.json")]
    environment = os.environ | {"JAX_PLATFORMS": "none such"}
    done = processes.finish([sys.executable, "-c", program, *line], env=environment)
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["devices"], plan["platform"]) == (5000, "cpu")


def test_train_returns_the_exit_code_of_the_loop(capsys, work):
    calls = work("spmd_lm.training.loop", "train", Exit.PREEMPTED)
    assert main(["train", DEBUG, "train.steps=7"]) == Exit.PREEMPTED
    ((config, signals, _),) = calls
    assert config == load(DEBUG, ["train.steps=7"]) and isinstance(signals, StopSignals)


def test_a_signal_during_the_import_of_the_loop_reaches_the_loop(work):
    caught = []
    before = signal.signal(signal.SIGTERM, lambda *_: caught.append("by nobody"))

    def imported(name: str):
        if name != "train":
            raise AttributeError(name)
        os.kill(os.getpid(), signal.SIGTERM)
        return lambda config, signals, fallback: caught.append(signals.received) or Exit.PREEMPTED

    try:
        work("spmd_lm.training.loop", "main", None, __getattr__=imported)
        assert main(["train", DEBUG]) == Exit.PREEMPTED
        assert caught == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_train_leaves_standard_output_to_json(capsys, work):
    work("spmd_lm.training.loop", "train", lambda config, signals, fallback: print("step 1") or Exit.DONE)
    assert main(["train", DEBUG, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"directory": "runs/debug", "exit_code": 0}, "step 1\n")


def test_a_moved_run_is_read_from_its_new_directory(work, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(dump(load(DEBUG, ["run.dir=elsewhere"])))
    calls = work("spmd_lm.evaluation.evaluate", "evaluate_run", {"eval_loss": 1.25, "tokens": 81920})
    assert main(["eval", str(tmp_path), "train.eval_batches=8"]) == 0
    assert calls[0][0].run.directory == tmp_path
    assert capsys.readouterr().out == "eval_loss       1.25\ntokens          81,920\n"
    (tmp_path / "config.yaml").unlink()
    assert main(["eval", str(tmp_path)]) == Exit.CONFIG
    assert "no config.yaml" in errors(capsys)[0]


def test_a_loss_of_nan_sets_the_exit_code_of_eval(work, tmp_path, capsys):
    work("spmd_lm.evaluation.evaluate", "evaluate_run", {"step": 7, "eval_loss": math.nan, "eval_perplexity": math.inf})
    target = tmp_path / "eval.json"
    assert main(["eval", DEBUG, "--json", str(target)]) == Exit.NON_FINITE
    assert json.loads(target.read_text()) == {"step": 7, "eval_loss": None, "eval_perplexity": None}
    assert capsys.readouterr().err.startswith("error: runs/debug: at step 7 eval_loss is nan. Lower optim.lr, ")


def test_tasks_are_evaluated_in_place_of_the_validation_data(work, tmp_path, capsys):
    figures = {
        "metrics": {"perplexity": 1234.5678},
        "n": 4321,
        "truncated": 2,
        "ci95": {"perplexity": [1200, math.inf]},
    }
    result = {"step": 7, "tasks": {"lambada": figures}}
    calls = work("spmd_lm.evaluation.zero_shot", "evaluate_tasks", result)
    assert main(["eval", DEBUG, "--task", "lambada=x.jsonl", "--task", "validation", "--stride", "3"]) == Exit.DONE
    assert calls == [(load(DEBUG), ["lambada=x.jsonl", "validation"], 3, False)]
    assert capsys.readouterr().out.splitlines() == [
        "step                7",
        "lambada.perplexity  1,234.57   95% [1,200, inf]",
        "lambada.n           4,321",
        "lambada.truncated   2",
    ]
    assert api.evaluate(load(DEBUG), tasks=["validation"]) == result and calls[-1][1:] == (["validation"], None, False)


def test_json_has_null_for_nan_and_infinity(work, capsys):
    work("spmd_lm.training.bench", "bench", {"mfu": -math.inf, "seconds": {"all": [1.5, math.nan]}}, render=str)
    assert main(["bench", DEBUG, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {"mfu": None, "seconds": {"all": [1.5, None]}}


def test_generate_takes_prompts_and_sampling(capsys, work):
    calls = work("spmd_lm.generation.generate", "generate_run", ["def f", "class C"])
    prompts = ["--prompt", "def", "--prompt", "class"]
    assert main(["generate", DEBUG, *prompts, "--tokens", "5", "--top-k", "3", "--greedy", "--json", "-"]) == 0
    assert calls[0][1:] == (["def", "class"], Sampling(tokens=5, top_k=3, greedy=True), False, None)
    assert json.loads(capsys.readouterr().out)[1] == {"prompt": "class", "text": "class C"}


@pytest.mark.parametrize("text", ["\x1b]0;title\a", "\x1b[2J", "\x9b31m", "a\rb", "\x7f\b"])
def test_a_result_steers_no_terminal(text, capsys):
    """A model's text, a file's name, a document that prepare tells of: whatever a verb prints."""
    write_result(argparse.Namespace(json=None), {}, f"{text}\n\tend")
    out = capsys.readouterr().out
    assert out == f"{text.encode('unicode_escape').decode()}\n\tend\n"


def test_characters_that_the_terminal_cannot_show_are_escaped(work, monkeypatch):
    """A container may have no locale."""
    work("spmd_lm.generation.generate", "generate_run", ["caf\xe9 \U0001f600"])
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["generate", DEBUG]) == 0
        assert out.buffer.getvalue() == b"caf\\xe9 \\U0001f600\n"


@pytest.mark.parametrize("verb", ["plan", "eval", "generate", "bench", "train"])
def test_an_interrupt_during_an_import_ends_the_process(verb):
    """Extension modules swallow a KeyboardInterrupt, or turn it into an ImportError.  The default action of the signal
    ends the process; a shell calls that 130."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "import spmd_lm.cli\n"
        "class Swallow:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.startswith(('jax', 'numpy')):\n"
        "            try: os.kill(os.getpid(), signal.SIGINT)\n"
        "            except KeyboardInterrupt: print('swallowed', file=sys.stderr)\n"
        "sys.meta_path.insert(0, Swallow())\n"
        "sys.exit(spmd_lm.cli.main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", program, verb, DEBUG]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ignored_interrupts_stay_ignored(work):
    work(
        "spmd_lm.planning.plan_report", "describe", lambda config: os.kill(os.getpid(), signal.SIGINT) or {}, render=str
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts background jobs
    try:
        assert main(["plan", DEBUG]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_help_shows_required_arguments_as_required(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    assert capsys.readouterr().out.startswith("usage: spmd-lm plan CONFIG [section.key=value ...] [OPTION ...]\n")


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"spmd-lm {spmd_lm.__version__}\n"


def test_help_shows_the_defaults_of_sampling(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    sampling = capsys.readouterr().out.split("sampling:")[1]
    told = dict(re.findall(r"--([\w-]+) [NXP] .*\(default ([\d.]+)\)", sampling))
    assert told == {
        key.name.replace("_", "-"): str(key.default) for key in dataclasses.fields(Sampling) if key.name != "greedy"
    }


def test_bench_takes_steps_and_warmup(work, capsys):
    calls = work("spmd_lm.training.bench", "bench", {"tokens_per_second": 3}, render=str)
    assert main(["bench", DEBUG, "--steps", "4", "--warmup", "1"]) == 0
    assert calls[0][1:] == (4, 1)
    assert capsys.readouterr().out == "{'tokens_per_second': 3}\n"


@pytest.mark.usefixtures("in_this_process")
def test_audit_s_devices_are_its_topology_s(work, capsys):
    calls = work("spmd_lm.planning.audit", "audit", {"ok": False}, render=lambda result: "differs")
    assert main(["audit", DEBUG, "run.simulate_devices=4", "--topology", "cpu:8"]) == Exit.CHECK_FAILED
    ((config, topology, hlo),) = calls
    assert (config.run.simulate_devices, str(topology), hlo) == (
        8,
        "cpu:8",
        None,
    ) and capsys.readouterr().out == "differs\n"
    assert main(["audit", DEBUG, "--devices", "4", "--topology", "cpu:8"]) == Exit.CONFIG
    assert errors(capsys) == ["error: --topology has devices of its own. Leave out --devices."]


def test_audit_writes_the_program_where_it_can(work, tmp_path, capsys):
    calls = work("spmd_lm.planning.audit", "audit", {"ok": True}, render=str)
    target = tmp_path / "step.hlo"
    assert main(["audit", DEBUG, "--hlo", str(target)]) == Exit.DONE
    assert calls[0][2] == target
    capsys.readouterr()
    for impossible in (tmp_path, tmp_path / "missing" / "step.hlo"):
        assert main(["audit", DEBUG, "--hlo", str(impossible)]) == Exit.CONFIG
        assert errors(capsys) == [f"error: --hlo {impossible}: cannot be written. Give a file in a writable directory."]
    for taken, out, told in (
        ("-", "-", "--hlo -: the program needs a file of its own. Name another one."),
        ("-", "out.json", "--hlo -: the program needs a file of its own. Name another one."),
        ("one", "one", "--json one: is --hlo too. Name another file."),
    ):
        assert main(["audit", DEBUG, "--hlo", taken, "--json", out]) == Exit.CONFIG
        assert errors(capsys) == [f"error: {told}"]
    assert len(calls) == 1


def test_functions_of_a_run(work):
    config = api.load_config(DEBUG)
    work("spmd_lm.training.loop", "train", Exit.DONE)
    assert api.train(config) == config.run.directory
    work("spmd_lm.training.loop", "train", Exit.PREEMPTED)
    with pytest.raises(KeyboardInterrupt, match="resumes it"):
        api.train(config)
    work("spmd_lm.evaluation.evaluate", "evaluate_run", {"eval_loss": 1.0})
    assert api.evaluate(config) == {"eval_loss": 1.0}
    calls = work("spmd_lm.generation.generate", "generate_run", ["a text"])
    assert api.generate(config, "a", tokens=3) == "a text"
    assert calls[-1] == (config, ["a"], Sampling(tokens=3))


def test_every_problem_is_one_line_without_a_traceback(capsys):
    assert main(["train", DEBUG, "model.heds=3", "train.steps=x"]) == Exit.CONFIG
    first, second = errors(capsys)
    assert first == "error: command line: model: unknown key 'heds'. Did you mean 'heads'?"
    assert second == "error: command line: train.steps: expected a whole number, got 'x'."


def test_an_error_of_the_verb_sets_its_exit_code(capsys, work):
    work("spmd_lm.training.loop", "train", CheckpointError("runs/debug: of another model"))
    assert main(["train", DEBUG]) == Exit.CHECKPOINT
    assert errors(capsys) == ["error: runs/debug: of another model"]


def test_an_interrupt_prints_nothing(capsys, work):
    work("spmd_lm.training.loop", "train", KeyboardInterrupt())
    assert main(["train", DEBUG]) == Exit.INTERRUPTED
    assert errors(capsys) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["trian", DEBUG], "no verb 'trian'. Did you mean train?"),
        (["fly"], f"no verb 'fly'. Verbs: {', '.join(VERBS)}."),
        (["train"], "spmd-lm train: no CONFIG given"),
        (["train", DEBUG, "--devcies", "8"], "unrecognized arguments: --devcies 8. Did you mean --devices?"),
        (["train", DEBUG, "--steps", "8"], "unrecognized arguments: --steps 8. Did you mean train.steps=...?"),
        (["train", DEBUG, "--devices", "many"], "run.simulate_devices: expected a whole number, got 'many'."),
        (["train", DEBUG, "--devices"], "expected one argument"),
        (["train", "debug.yml"], "debug.yml: no such file."),
        (["train", DEBUG, "run.dir=~nouser/x"], "expected ~ or the ~name of a user of this machine"),
        (["audit", DEBUG, "--topology", "v9z:4x4"], "'v9z' is not known. Known: cpu:8"),
        (["bench", DEBUG, "--steps", "0"], "expected a whole number from 1 to 1,000,000, got '0'"),
        (["generate", DEBUG, "--top-p", "2"], "top_p=2.0: "),
        (
            ["generate", "absent.yaml", "--tokens", "-5"],
            "tokens=-5: ask for 1 to 1,000,000",
        ),  # before it looks for a run
        (["train", DEBUG, "train.eval_every=1", "--seeds", str(2**31 - 1)], "--seeds 2147483647: at most 10,000"),
        (["train", DEBUG, "--seeds", "2", "--fallback"], "--fallback is of one run. Leave it or --seeds out."),
        (["train", DEBUG, "--devices", str(2**31 - 1)], "run.simulate_devices: "),
        (["plan", DEBUG, "--devices", str(10**30)], "run.simulate_devices: "),
        (["plan", DEBUG, "--top", str(10**12)], "expected a whole number from 0 to 2,147,483,647"),
        (["bench", DEBUG, "--steps", str(2**31 - 1)], "expected a whole number from 1 to 1,000,000"),
        (["eval", DEBUG, "--stride", str(2**31)], "expected a whole number from 1 to 2,147,483,647"),
        (["generate", DEBUG, "--tokens", str(2**31)], "tokens=2147483648: ask for 1 to 1,000,000"),
        (["generate", DEBUG, "--top-k", str(2**70)], "top_k=1180591620717411303424: "),
        (["generate", DEBUG, "--prompt", "-def"], "expected one argument. Write --prompt=-def."),
        (["generate", DEBUG, "--prompt"], "expected one argument. See spmd-lm generate --help."),
    ],
)
def test_a_wrong_command_line_is_reported_with_its_fix(capsys, line, message):
    assert main(line) == Exit.CONFIG
    (error,) = errors(capsys)
    assert error.startswith("error: ") and message in error


def shell(line: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a line in bash, in which `spmd-lm` is this command."""
    line = f"set -o pipefail; {line}".replace("spmd-lm", f"{sys.executable} -m spmd_lm")
    return subprocess.run(
        ["bash", "-c", line], env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "line", [f"spmd-lm config {DEBUG}", f"spmd-lm config {DEBUG} --json -", "spmd-lm --help", "spmd-lm plan --help"]
)
def test_a_closed_pipe_is_no_error(line):
    done = shell(f"({line}; echo $? >&2) | true")
    assert (done.returncode, done.stderr) == (0, "0\n")


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (f"spmd-lm config {DEBUG} > /dev/full", "standard output"),
        (f"spmd-lm config {DEBUG} --json - > /dev/full", "standard output"),
        (f"spmd-lm config {DEBUG} --json /dev/full", "--json /dev/full"),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_reported_in_one_line(line, where):
    done = shell(line)
    told = f"error: {where}: cannot be written: No space left on device. Make room, or write elsewhere.\n"
    assert (done.returncode, done.stderr) == (Exit.CONFIG, told)


def test_a_closed_pipe_does_not_change_the_exit_code(work, capsys, monkeypatch):
    work("spmd_lm.training.loop", "train", Exit.PREEMPTED)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["train", DEBUG, "--json", "-"]) == Exit.PREEMPTED


@pytest.mark.parametrize("line", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_every_verb_has_help(line, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(line)
    assert "usage: spmd-lm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "code", "heavy"),
    [
        (["--help"], 0, "pydantic yaml jax numpy"),
        (["train", DEBUG, "train.steps=x"], 2, "jax numpy flax orbax"),
        (["generate", DEBUG, "--seed", "99999999999999999999"], 2, "jax numpy flax orbax"),
    ],
)
def test_help_and_errors_are_fast(line, code, heavy):
    """No import is slow; README has the measured seconds."""
    ask = f"print('heavy:', *({heavy.split()} & sys.modules.keys()))".replace("[", "{").replace("]", "}")
    program = (
        f"import sys, atexit; atexit.register(lambda: {ask}); from spmd_lm.cli import main; sys.exit(main({line}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1].strip() == "heavy:"
