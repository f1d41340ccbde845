"""The files of launch/: valid for what reads them, short, and tpu_vm.sh against a gcloud that takes slices away."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from spmd_lm.runtime.gpu_memory import LARGE
from spmd_lm.runtime.xla_options import table
from tests import processes
from tests.processes import ROOT

LAUNCH = ROOT / "launch"
SCHEMA = "jobset_v1alpha2_strict.schema.json"


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_a_launch_file_is_short_and_says_how_to_use_it(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 62 and max(map(len, lines)) <= 120
    header = "\n".join(lines[:20])
    assert "    " in header and "edit" in header.lower() and "launch/" in header


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck here")
def test_shellcheck_is_clean():
    scripts = [path for path in LAUNCH.iterdir() if path.read_text().startswith("#!/usr/bin/env bash")]
    assert {path.name for path in scripts} == {"slurm.sbatch", "tpu_vm.sh"}
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not os.environ.get("SPMD_LM_DATA"), reason="the JobSet schema is in SPMD_LM_DATA, which is not set")
def test_the_jobset_file_validates():
    schema = json.loads((Path(os.environ["SPMD_LM_DATA"]) / SCHEMA).read_text())
    jobset = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())
    jsonschema.validate(jobset, schema)
    jobset["spec"]["failurePolicy"]["maxRestart"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(jobset, schema)


UV = Path(sys.executable).with_name("uv")
READ_TASK = "import sky, sys; task = sky.Task.from_yaml(sys.argv[1]); print(task.num_nodes, *task.resources)"


@pytest.mark.slow
@pytest.mark.skipif(not UV.exists(), reason="no uv in this environment to install SkyPilot with")
def test_skypilot_reads_its_file(tmp_path):
    """SkyPilot is 459 MB, and has an environment to itself."""
    command = [UV, "run", "--quiet", "--no-project", "--with", "skypilot==0.14.1", "python", "-c", READ_TASK]
    text = (LAUNCH / "skypilot.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(text.replace("num_nodes", "num_nodez"))
    good, wrong = (
        subprocess.run([*command, path], capture_output=True, text=True)
        for path in (LAUNCH / "skypilot.yaml", tmp_path / "wrong.yaml")
    )
    assert good.returncode == 0 and "H100" in good.stdout and good.stdout.startswith("2 "), good.stderr
    assert wrong.returncode == 1 and "did you mean 'num_nodes'" in wrong.stderr


# A slice is ACTIVE at once.  The first is taken away during the run, the second run is preempted on its own, and once
# there is no answer.
GCLOUD = """#!/usr/bin/env bash
echo "$*" >> log
case "$*" in
    *describe*)
        mkdir silent 2>/dev/null && echo "the network is down" >&2 && exit 1
        cat state 2>/dev/null || { echo "ERROR: NOT_FOUND: Resource 'mine' was not found" >&2; exit 1; } ;;
    *create*) echo ACTIVE > state ;;
    *delete*) rm -f state ;;
    *ssh*)
        runs=$(($(cat runs 2>/dev/null || echo 0) + 1))
        echo $runs > runs
        [ $runs = 1 ] && echo SUSPENDED > state && exit 255
        [ $runs = 2 ] && exit 3
        exit LAST ;;
esac
"""


def run_tpu_vm(tmp_path: Path, last: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "gcloud").write_text(GCLOUD.replace("LAST", str(last)))
    (tmp_path / "gcloud").chmod(0o755)
    given = {"NAME": "mine", "ZONE": "z", "TYPE": "v5p-128", "REPOSITORY": "r", "SECONDS_BETWEEN": "0"} | variables
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [LAUNCH / "tpu_vm.sh", "train", "a b.yaml"]
    inherited = {name: value for name, value in os.environ.items() if name != "LIBTPU_INIT_ARGS"}
    return processes.finish(command, cwd=tmp_path, env=inherited | given | path)


@pytest.mark.parametrize("last", [0, 4])
def test_tpu_vm_starts_again_until_the_run_ends(tmp_path, last):
    done = run_tpu_vm(tmp_path, last)
    assert done.returncode == last and "the network is down" in done.stderr, done.stderr
    log = (tmp_path / "log").read_text()
    calls = [word for line in log.splitlines() for word in ("create", "delete", "ssh") if f" {word}" in line]
    assert calls == ["create", "ssh", "delete", "create", "ssh", "ssh", "delete"]
    assert "exec .venv/bin/spmd-lm 'train' 'a b.yaml'" in log and not (tmp_path / "state").exists()


def advised(kind: str) -> str:
    """The value of LIBTPU_INIT_ARGS that the options for this kind of TPU need."""
    rows = (row for row in table() if row.environment and row.fits("tpu", kind, absent=False))
    return " ".join(row.environment.removeprefix("LIBTPU_INIT_ARGS=") for row in rows)


@pytest.mark.parametrize(
    ("slice_type", "kind"), [("v5p-128", "TPU v5"), ("v5litepod-16", "TPU v5 lite"), ("v6e-8", "TPU v6 lite")]
)
def test_tpu_vm_sets_what_the_table_advises_for_its_slice(tmp_path, slice_type, kind):
    run_tpu_vm(tmp_path, TYPE=slice_type)
    (value,) = {*re.findall("export LIBTPU_INIT_ARGS='(.*)'", (tmp_path / "log").read_text())}
    assert value == advised(kind)


def test_a_value_of_one_s_own_reaches_the_slice(tmp_path):
    run_tpu_vm(tmp_path, LIBTPU_INIT_ARGS="--xla_a=1 --xla_b='x y'")
    (export,) = {*re.findall("export LIBTPU_INIT_ARGS=.*", (tmp_path / "log").read_text())}
    told = subprocess.run(["bash", "-c", f"{export}\necho $LIBTPU_INIT_ARGS"], capture_output=True, text=True)
    assert told.stdout == "--xla_a=1 --xla_b='x y'\n"


def test_the_yaml_files_set_what_the_table_advises_for_a_v5p():
    jobset = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5p-slice"
    assert pod["containers"][0]["env"] == [{"name": "LIBTPU_INIT_ARGS", "value": advised("TPU v5")}]
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["envs"]["LIBTPU_INIT_ARGS"] == advised("TPU v5") and advised("TPU v5")


def test_every_file_that_starts_gpus_has_jax_allocate_most_of_them():
    setting = re.compile(rf"XLA_PYTHON_CLIENT_MEM_FRACTION\W+(?:value|XLA_PYTHON_CLIENT_MEM_FRACTION)?\W*{LARGE}\b")
    found = {path.name for path in LAUNCH.iterdir() if setting.search(path.read_text())}
    assert found == {path.name for path in LAUNCH.iterdir()} - {"tpu_vm.sh", "local"}  # which hands on its environment
    assert yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["envs"]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == str(
        LARGE
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["0.92", ""]),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, ["0.5", ""]),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, ["", "0.5"]),
    ],
)
def test_slurm_keeps_a_fraction_of_one_s_own(tmp_path, given, expected):
    """The fraction has two names; jax takes one."""
    script = 'echo "$XLA_PYTHON_CLIENT_MEM_FRACTION,$XLA_CLIENT_MEM_FRACTION" > told'
    for name, text in (("srun", script), ("squeue", "echo COMPLETING"), ("scancel", ""), ("scontrol", "")):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if "MEM_FRACTION" not in name}
    environment = inherited | given | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    done = processes.finish(["bash", LAUNCH / "slurm.sbatch", "train"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "told").read_text().strip().split(",") == expected
