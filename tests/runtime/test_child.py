"""A child compiles for a topology: its death is one line, and what it returns or raises comes back."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmd_lm import api
from spmd_lm.cli import main
from spmd_lm.errors import CompilerError, ConfigError, DamagedCheckpointError, Exit, LayoutError, UserError
from spmd_lm.runtime.child import run_in_child
from tests import processes
from tests.deaths import end_with, exit_with, fail, fail_without_pickle, print_and_return, read_nowhere, say_and_sleep

CHECK = "F1127 17:45:35.569384   13853 memory.cc:310] Check failed: size > 0 \n*** Check failure stack trace: ***\n"
FLAG = "ERROR: Unknown command line flag 'xla_dump_to'. Did you mean: xla_jf_dump_to ?\n"
A_FAULT, MEMORY = "try another remat.policy", "on a machine with more memory"


@pytest.fixture(autouse=True)
def interruptible():
    """A shell's `&` has SIGINT ignored, here and in all that is started."""
    with processes.handled(signal.SIGINT, signal.default_int_handler):
        yield


DEATHS = [
    (read_nowhere, (), "its compiler ended the process (killed by SIGSEGV)", A_FAULT),
    (end_with, (CHECK, signal.SIGABRT), "(killed by SIGABRT: Check failed: size > 0 )", A_FAULT),
    (end_with, ("", signal.SIGBUS), "(killed by SIGBUS)", A_FAULT),
    (end_with, ("", signal.SIGKILL), "killed by SIGKILL, as the system does where memory is short", MEMORY),
    (end_with, ("", signal.SIGTERM), "the process that compiles was killed by SIGTERM", "Start again."),
    (exit_with, (FLAG, 1), "(exit code 1, without a result: Unknown command line flag 'xla_dump_to'", A_FAULT),
    (exit_with, ("no more\n", 0), "(exit code 0, without a result: no more)", A_FAULT),
    (sys.exit, (3,), "(exit code 3, without a result)", A_FAULT),
]


@pytest.mark.parametrize(("function", "arguments", "how", "advice"), DEATHS, ids=[how for *_, how, _ in DEATHS])
def test_a_child_that_dies_is_one_line_with_what_to_try(function, arguments, how, advice):
    with pytest.raises(CompilerError) as died:
        run_in_child("v5p:2x2x2", function, *arguments)
    told = str(died.value)
    assert told.startswith("--topology v5p:2x2x2: ") and how in told and advice in told and "\n" not in told
    assert died.value.reason in told and not died.value.out_of_memory and died.value.code == Exit.CONFIG
    assert getattr(died.value, "__notes__", []) == [each for each in arguments[:1] if each and isinstance(each, str)]


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, 1, 0, -signal.SIGRTMIN, -40, -64])
@pytest.mark.parametrize("written", [0, 1, 2, 11, 40, -1])
def test_a_child_that_dies_while_it_answers_is_one_line_too(code, written, monkeypatch):
    answer = pickle.dumps((api.Report({"rows": [1, 2.5], "large": "x" * 100}, "the text"), None))
    ended = subprocess.CompletedProcess([], code, answer[:written], b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(CompilerError, match=r"^--topology cpu:8: .*(killed by \w+|exit code \d, without a result)"):
        run_in_child("cpu:8", print_and_return)


@pytest.mark.parametrize("verb", ["audit", "preflight"])
def test_a_verb_outlives_its_compiler(verb, monkeypatch, capsys):
    monkeypatch.setattr(api, "run_in_child", lambda target, *_: run_in_child(target, read_nowhere))
    assert main([verb, "configs/debug.yaml", "--topology", "v5p:2x2x2"]) == Exit.CONFIG
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith("error: --topology v5p:2x2x2: its compiler ended the process (killed by SIGSEGV)")


def test_a_result_comes_back_whatever_libraries_print(capsys):
    report = api.Report({"ok": True, "rows": [(1, 2.5)], "large": "x" * 10**6}, "the text")
    back = run_in_child("cpu:8", print_and_return, report)
    assert type(back) is api.Report and back == report and str(back) == "the text"
    told = capsys.readouterr()
    assert told.out == "" and sorted(told.err.splitlines()) == ["a line of C++", "a line of Python"]


@pytest.mark.parametrize(
    "error",
    [
        UserError("a"),
        ConfigError("model.heads: 3", "train.batch: 4"),
        LayoutError("parallel.model=3"),
        CompilerError("the compiler refuses this step: no.", "no", out_of_memory=True),
        DamagedCheckpointError(Path("runs/a"), "a bit"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_what_they_hold(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (CompilerError("the compiler refuses this step: no.", "no", out_of_memory=True), CompilerError),
        (ZeroDivisionError("by zero"), ZeroDivisionError),
        (MemoryError(), MemoryError),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_a_child_raises_is_raised_here(error, raised):
    with pytest.raises(raised) as caught:
        run_in_child("cpu:8", fail, error)
    assert type(caught.value) is raised and str(caught.value) == str(error)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("in fail" in notes) == (not isinstance(error, UserError))


def test_an_exception_that_cannot_be_pickled_is_told_too():
    with pytest.raises(RuntimeError, match="in fail_without_pickle"):
        run_in_child("cpu:8", fail_without_pickle)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.01)


# Whoever starts the tests may have it ignored, as nohup does.
SLEEPS = """
import pathlib, signal, sys
from spmd_lm.runtime.child import run_in_child
from tests.deaths import say_and_sleep
signal.signal(signal.SIGHUP, signal.SIG_DFL)
run_in_child("v5p:2x2x2", say_and_sleep, pathlib.Path(sys.argv[1]))
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems end no child with its parent")


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_child_ends_with_its_parent(number, tmp_path):
    command = [sys.executable, "-c", SLEEPS, str(pid := tmp_path / "pid")]
    parent = subprocess.Popen(command, cwd=processes.ROOT, stderr=subprocess.PIPE)
    wait_for(lambda: parent.poll() is not None or pid.exists())  # a signal just before a wait would not end the wait
    parent.send_signal(number)
    parent.communicate()
    assert parent.returncode == -number
    wait_for(lambda: not is_running(int(pid.read_text())))


@linux
def test_an_interrupted_cell_leaves_no_child(tmp_path):
    """A notebook's interrupt reaches its kernel alone."""
    pid = tmp_path / "pid"

    def interrupt() -> None:
        wait_for(pid.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_in_child("v5p:2x2x2", say_and_sleep, pid)
    wait_for(lambda: not is_running(int(pid.read_text())))


@linux
def test_ctrl_c_ends_both_in_silence():
    """A terminal signals both."""
    command = [sys.executable, "-m", "spmd_lm", "audit", "configs/debug.yaml", "--topology", "v5p:2x2x2"]
    parent = subprocess.Popen(command, cwd=processes.ROOT, stderr=subprocess.PIPE, start_new_session=True)
    wait_for(lambda: parent.poll() is not None or children(parent.pid))
    (child,) = children(parent.pid)
    os.killpg(parent.pid, signal.SIGINT)
    _, told = parent.communicate()
    assert parent.returncode == -signal.SIGINT and told == b""
    wait_for(lambda: not is_running(child))


LLAMA = "vocab=32000 mlp_width=5504 norm_type=rms positions=rotary activation=swiglu use_bias=false attention=xla"
LLAMA += " tie_embeddings=false layers=2 width=2048 heads=16 context=1024 dropout=0 attention_dropout=0"
GPT = "layers=8 width=1024 heads=16 context=256 vocab=512"
SMALL_STACKS = "--fibers_default_thread_stack_size=32768"


def audit_on_v5p(model: str, zero: int, **environment: str) -> tuple[int, str, str]:
    pytest.importorskip("libtpu", reason="the compiler for TPUs is not installed")
    keys = ["precision.compute=bfloat16", "remat.policy=full", "data.source=synthetic", f"parallel.zero={zero}"]
    keys += [f"model.{key}" for key in model.split()]
    process = processes.start(
        "audit", "configs/debug.yaml", "--topology", "v5p:2x2x2", "--json", "-", *keys, **environment
    )
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize(("model", "zero"), [(LLAMA, 3), (GPT, 1)], ids=["llama", "gpt"])
def test_steps_whose_products_nest_deep_compile(model, zero):
    """libtpu's own stacks would overflow."""
    code, out, err = audit_on_v5p(model, zero)
    assert code == Exit.DONE and json.loads(out)["ok"], err


@pytest.mark.slow
def test_a_compiler_that_overflows_its_stack_is_one_line():
    code, out, err = audit_on_v5p(GPT, 1, LIBTPU_INIT_ARGS=SMALL_STACKS)
    assert (code, out) == (Exit.CONFIG, "") and err.count("\n") == 1
    assert err.startswith("error: --topology v5p:2x2x2: its compiler ended the process (killed by SIGSEGV)")
