"""A run is never ended by its output; one whose directory fails leaves saved, with a sentence and an exit code."""

import errno
import importlib.util
import logging
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import profiler
from orbax.checkpoint import v1 as ocp
from pydantic import ValidationError

from spmd_lm import files
from spmd_lm.config.checks import problems
from spmd_lm.config.schema import Run
from spmd_lm.errors import Exit, OutputError
from spmd_lm.runtime.outputs import is_heard, open_closed_streams, print_line, report_unraisable, unfailing, writing
from spmd_lm.runtime.progress import Progress
from spmd_lm.training import loop
from tests import processes
from tests.processes import ROOT
from tests.training import test_loop
from tests.training.test_loop import FakeProgram, make_config, records, saved, status

fake = test_loop.fake  # no step is compiled
SYNCHRONOUS = {"checkpoint__async": False}
SMALL = (
    "configs/debug.yaml --devices 2 model.layers=1 model.width=16 model.heads=2 model.context=16 data.source=synthetic"
)


def shell(line: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs `line`, in which spmd-lm is this package's, with the output of jax's plugins shown and buffers left full."""
    line = line.replace("spmd-lm", f"{shlex.quote(sys.executable)} -m spmd_lm")
    ours = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TPU_ACCELERATOR_TYPE")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in (*ours, "TPU_WORKER_HOSTNAMES", "PYTHONUNBUFFERED")
    }
    return processes.finish(["bash", "-c", line], cwd=ROOT, env=inherited | environment)


@pytest.fixture
def hangup():
    """Python's own answer to SIGHUP, which a process under nohup begins without."""
    with processes.handled(signal.SIGHUP, signal.SIG_DFL):
        yield


@pytest.fixture
def disk(tmp_path):
    """A function that mounts a disk of this size, or changes its size."""
    path, mounted = tmp_path / "disk", []
    path.mkdir()

    def disk(size: str) -> Path:
        remount = ["remount"] if mounted else []
        options = ",".join([f"size={size}", *remount])
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("cannot mount a file system here")
        mounted.append(path)
        return path

    yield disk
    if mounted:
        subprocess.run(["umount", "--lazy", path], check=True)


def test_a_line_that_cannot_be_printed_harms_nothing():
    with open("/dev/full", "w") as full:
        print_line("one", full)
        print_line("two", full)
        full.write("left in the buffer: closing the file writes it")
    print_line("three", full)  # which is closed


def test_a_reader_that_is_slow_costs_lines_and_no_more():
    """The pipe is non-blocking, as a parent may make it."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with open(write, "w") as stream, open(read, "rb") as reader:
        unfailing(stream).write("x" * 2**17)
        unfailing(stream).flush()  # there is room for half of it
        reader.read(2**16)
        print_line("heard", stream)
        assert b"heard" in os.read(read, 2**17)
    with open(os.devnull, "w", encoding="ascii") as narrow:
        print_line("\u00e9", narrow)
        print_line("then", narrow)
        assert not narrow.closed


def test_progress_is_silent_after_its_first_error(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        progress = Progress(9)
        with progress.live_line(), progress.compiling(None):
            progress.step(1)
            progress.record({"step": 1, "loss": 2.0, "tokens_per_second": 1.0, "mfu": None})
    assert unfailing(full).closed  # without an error: its buffer went nowhere


TRAINS = """
import sys, types
from spmd_lm.cli import main
from spmd_lm.runtime.progress import Progress
def train(config, signals, fallback):
    for step in range(LINES):
        Progress(9).log("x" * 10_000)
        print("what a library prints" * 1000)
        print("what it warns of", file=sys.stderr)
    print("what is left in the buffer")
    return 3
fake = sys.modules["spmd_lm.training.loop"] = types.ModuleType("loop")
fake.train = train
sys.argv[1:] = ["train", "configs/debug.yaml"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("output", "lines"), [("> /dev/full", 0), ("2> /dev/full > /dev/full", 9), (">&- 2>&-", 9), ("| true", 9)]
)
def test_what_trains_without_output_ends_with_its_own_code(output, lines):
    """Python's own code would be 120, for what it cannot flush at exit."""
    line = (
        f"set -o pipefail; {shlex.quote(sys.executable)} -c {shlex.quote(TRAINS.replace('LINES', str(lines)))} {output}"
    )
    assert shell(line).returncode == Exit.PREEMPTED


@pytest.mark.slow
@pytest.mark.parametrize("output", [">/dev/full 2>/dev/full", ">&- 2>&-"])
def test_a_run_without_output_is_complete(tmp_path, output):
    run_dir = tmp_path / "run"
    assert shell(f"spmd-lm train {SMALL} train.steps=3 run.dir={run_dir} {output}").returncode == Exit.DONE
    assert status(run_dir)["state"] == "done" and saved(run_dir) == [3]
    assert [record["step"] for record in records(run_dir)] == [1, 2, 3]  # of these files none was standard output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("spmd-lm --version >/dev/full", "error: standard output: cannot be written: No space left on device. Make"),
        ("spmd-lm --version >&-", "error: standard output: cannot be written: Bad file descriptor. Make"),
        ("spmd-lm nonsense 2>/dev/full", ""),
    ],
)
def test_a_result_that_cannot_be_written_is_an_error(line, message):
    ended = shell(line)
    assert ended.returncode == Exit.CONFIG and ended.stdout == ""
    assert ended.stderr.startswith(message) and ended.stderr.count("\n") == bool(message)


def test_a_closed_stream_is_not_the_next_file(tmp_path):
    program = (
        "import os; from spmd_lm.runtime.outputs import open_closed_streams; open_closed_streams()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); os._exit(file.fileno())"
    )
    assert shell(f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} <&- >&- 2>&-").returncode == 3
    open_closed_streams()  # of this process none is closed
    assert os.fstat(1)


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "code"), [(signal.SIG_DFL, Exit.PREEMPTED), (signal.SIG_IGN, Exit.DONE)])
def test_a_run_outlives_its_terminal(tmp_path, answer, code):
    """A run is saved at once, or continues under nohup."""
    steps = tmp_path / "metrics.jsonl"
    line = f"{sys.executable} -m spmd_lm train {SMALL} train.steps=300 run.dir={tmp_path}"
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, answer)
        os.chdir(ROOT)
        os.execv(sys.executable, line.split())
    while not steps.exists() or steps.read_text().count("\n") < 3:
        os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    step = status(tmp_path)["step"]
    assert step in saved(tmp_path) and (step == 300) == (code is Exit.DONE)


def test_a_hangup_stops_a_run_as_a_termination_does(tmp_path, hangup):
    test_loop.kill_at(7, signal.SIGHUP)
    assert loop.train(make_config(tmp_path)) is Exit.PREEMPTED
    assert status(tmp_path)["step"] == 7 and saved(tmp_path) == [5, 7]


def test_under_nohup_a_hangup_stops_nothing(tmp_path, hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    test_loop.kill_at(7, signal.SIGHUP)
    assert loop.train(make_config(tmp_path)) is Exit.DONE


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5])
def test_a_second_interrupt_during_a_save_leaves_no_traceback(tmp_path, seconds):
    line = f"-m spmd_lm train {SMALL} model.layers=4 model.width=512 run.dir={tmp_path} train.steps=9999"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    process = subprocess.Popen([sys.executable, *line.split(), "checkpoint.every=10"], **pipes)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 20/"):
        assert process.poll() is None
    for pause in (0, seconds):
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    output, _ = processes.communicate(process)
    assert process.returncode == Exit.INTERRUPTED and "stopped" in output, output
    assert "Traceback" not in output and "Exception" not in output, output


@pytest.mark.parametrize(
    ("error", "heard"),
    [(KeyboardInterrupt(), False), (RuntimeError("Event loop is closed"), False), (RuntimeError("a fault"), True)],
    ids=["ctrl-c", "tensorstore", "other"],
)
def test_what_nobody_can_catch_is_reported_if_it_tells_something(monkeypatch, capsys, error, heard):
    class Dying:
        def __del__(self):
            raise error

    monkeypatch.setattr(sys, "unraisablehook", report_unraisable)
    Dying()
    told = capsys.readouterr().err
    assert told.endswith("RuntimeError: a fault\n") if heard else told == ""


@pytest.mark.parametrize(("logger", "heard"), [("absl", False), ("asyncio", False), ("jax._src.xla_bridge", True)])
def test_orbax_and_asyncio_do_not_log_what_is_reported(logger, heard):
    assert is_heard(logging.LogRecord(logger, logging.ERROR, "", 0, "", None, None)) is heard


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="its plugins are not installed")
def test_plugins_for_absent_hardware_are_silent():
    """`plan` without --devices asks for all that are here."""
    ended = shell("spmd-lm plan configs/debug.yaml", TF_CPP_MIN_LOG_LEVEL="2")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture
def full(monkeypatch):
    """Names of files whose next write finds a full disk."""
    names, create = set(), files.create

    def create_on_disk(path: Path):
        if path.name not in names:
            return create(path)
        names.remove(path.name)
        return open("/dev/full", "wb")

    monkeypatch.setattr(files, "create", create_on_disk)
    return names


def test_a_full_disk_ends_a_run_saved_and_the_same_command_goes_on(tmp_path, full):
    config = make_config(tmp_path, checkpoint__every=0, train__log_every=1)
    FakeProgram.at = {7: lambda: full.add("status.json.tmp") or 1}
    with pytest.raises(OutputError) as told:
        loop.train(config)
    sentence = (
        r"status.json: cannot be written: No space left on device\. [\d,]+ bytes are free there, \d+ are needed\. "
    )
    assert re.fullmatch(f".*{sentence}Make room. Step (\\d+) is saved: the same .* from there.", str(told.value))
    assert told.value.code == Exit.CONFIG and saved(tmp_path) in ([6], [7])  # the host runs ahead
    ended = status(tmp_path)
    assert (ended["state"], ended["exit_code"]) == ("failed", 2)
    FakeProgram.at = {}
    assert loop.train(config) is Exit.DONE
    assert [record["step"] for record in records(tmp_path)] == [*range(1, 13)]


def test_a_record_that_cannot_be_written_ends_a_run_saved(tmp_path):
    config = make_config(tmp_path, checkpoint__every=0, **SYNCHRONOUS)
    FakeProgram.at = {7: lambda: os.remove(tmp_path / "metrics.jsonl") or 1}
    with pytest.raises(OutputError, match=r"metrics.jsonl: was moved, .* Step \d+ is saved"):
        loop.train(config)
    assert saved(tmp_path)


@pytest.fixture
def no_trace_is_left():
    """Resets jax's profiler, which keeps a trace that it cannot write."""
    yield
    profiler._profile_state.reset()


def test_a_trace_that_cannot_be_written_ends_a_run_saved(tmp_path, no_trace_is_left):
    (tmp_path / "profile").write_text("a file where its directory should be")
    config = make_config(tmp_path, checkpoint__every=0, train__profile={"steps": [3, 5]})
    with pytest.raises(OutputError, match=r"profile: the trace cannot be written: .* Step \d+ is saved"):
        loop.train(config)
    assert saved(tmp_path)


def test_a_full_disk_at_the_start_is_told(tmp_path, full):
    full.add("config.yaml.tmp")
    with pytest.raises(OutputError, match=r"config.yaml: cannot be written: No space left on device"):
        loop.train(make_config(tmp_path))
    FakeProgram.at = {}
    assert loop.train(make_config(tmp_path)) is Exit.DONE


@pytest.mark.parametrize("how", ["moved", "removed"])
@pytest.mark.parametrize("log_every", [2, 50])
def test_a_directory_that_is_gone_ends_its_run_and_is_not_made_again(tmp_path, how, log_every):
    config = make_config(tmp_path / "run", train__log_every=log_every, train__eval_every=0, **SYNCHRONOUS)

    def hang_up():
        if how == "moved":
            os.rename(tmp_path / "run", tmp_path / "elsewhere")
        else:
            shutil.rmtree(tmp_path / "run")
        return 1

    FakeProgram.at = {8: hang_up}
    with pytest.raises(OutputError, match=r"run.* was moved(, replaced)? or removed"):
        loop.train(config)
    assert not (tmp_path / "run").exists()
    if how == "moved":
        assert saved(tmp_path / "elsewhere") == [5]


def test_a_directory_that_was_made_again_is_another_run_s(tmp_path):
    config = make_config(tmp_path / "run", checkpoint__every=0, train__log_every=50, train__eval_every=0)

    def replace():
        os.rename(tmp_path / "run", tmp_path / "elsewhere")
        (tmp_path / "run").mkdir()
        for name in (".lock", "status.json"):
            (tmp_path / "run" / name).write_text("of another run")
        return 1

    FakeProgram.at = {8: replace}
    with pytest.raises(OutputError, match=r"run\S*: was moved, replaced or removed"):
        loop.train(config)
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "status.json"]
    assert (tmp_path / "run" / "status.json").read_text() == "of another run"


def test_a_file_on_a_read_only_disk_is_told(tmp_path):
    sentence = r"Read-only file system\. [\d,]+ bytes are free there, 3 are needed\. Make it writable\."
    with pytest.raises(OutputError, match=sentence), writing(tmp_path / "file", 3):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.slow
def test_disks_of_every_size(tmp_path, disk):
    """Room for nothing up to all but the last file: exit 2, or 5 where a checkpoint does not fit, one sentence, and the
    same command continues once there is room."""
    train = f"spmd-lm train {SMALL} run.dir={tmp_path / 'disk' / 'run'} train.steps=120 checkpoint.every=40"
    codes = []
    for size in ("4k", "12k", "40k", "200k", "900k", "1800k", "2600k", "40m"):
        disk(size)
        ended = shell(f"{train} >/dev/null")
        codes.append(ended.returncode)
        assert "Traceback" not in ended.stderr and ended.stderr.count("error: ") == (ended.returncode != 0), (
            ended.stderr
        )
        assert len(ended.stderr.splitlines()) <= 2, ended.stderr
        run_dir = tmp_path / "disk" / "run"
        if (run_dir / "checkpoints").exists():
            numbers = [path.name for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()]
            assert ended.returncode == 0 or set(numbers) <= {*map(str, range(121))}
    assert codes[0] == codes[1] == Exit.CONFIG and {*codes[2:-1]} <= {0, 2, 5} and codes[-1] == 0
    assert [record["step"] for record in records(tmp_path / "disk" / "run")][-1] == 120


NAMES = {
    "plain": True,
    "a b": True,
    " a ": True,
    "a%20b%": True,
    "a#b": True,
    "a\nb": True,
    "a:b@c": True,
    "file:": True,
    "a{b},c;d&e|f": True,
    "'a\"$b`": True,
    "~a": True,
    "-a": True,
    "]": True,
    "日本": True,
    "a[b]": False,
    "a[1..2]": False,
    "a*": False,
    "a?": False,
    "a\\b": False,
    "gs:": False,
}


@pytest.mark.parametrize(("name", "works"), NAMES.items(), ids=map(ascii, NAMES))
def test_a_checkpoint_is_readable_in_a_directory_of_this_name_or_it_is_refused(tmp_path, monkeypatch, name, works):
    path = tmp_path / name / "checkpoints" / "3"
    refused = problems({"run": Run(dir=str(path.parents[1]))})
    assert bool(refused) is not works and all("checkpoints in it could not be read" in line for line in refused)
    if works:
        state = {"a": {"b": jnp.arange(4.0)}}
        ocp.save_checkpointables_async(path, {"state": state}, overwrite=True).result()
        abstract = jax.tree.map(ocp_abstract, state)
        read = ocp.load_checkpointables(path, {"state": abstract})["state"]
        np.testing.assert_array_equal(read["a"]["b"], np.arange(4.0))
    else:  # nor below it
        path.mkdir(parents=True)
        monkeypatch.chdir(path)
        assert problems({"run": Run(name="debug")})


def ocp_abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def test_paths_that_are_urls_or_no_text_are_refused():
    assert problems({"run": Run(dir="/gs/bucket/run")}) and problems({"run": Run(dir="runs/gs:/run")})
    with pytest.raises(ValidationError, match="expected text in UTF-8"):
        Run(dir=os.fsdecode(b"\xff"))
