"""A job of two processes from outside: who can connect to it, what it lets out, and one process that fails alone."""

import ipaddress
import os
from pathlib import Path

import pytest

from spmd_lm.cli import main
from spmd_lm.errors import Exit
from tests.reliability.jobs import Job, losses

SECRETS = {"WANDB_API_KEY": "sekret-wandb-0123", "HF_TOKEN": "sekret-hf-4567", "AWS_SECRET_ACCESS_KEY": "sekret-aws-89"}
LISTENING = "0A"
FAILING_LOADER = """
import os, sys
from spmd_lm.cli import main
from spmd_lm.data.loader import CausalLMLoader
batch = CausalLMLoader.batch
def fail(self, step, shardings):
    if step == 3 and os.environ["JAX_PROCESS_ID"] == "1":
        raise ValueError("a fault of this process alone")
    return batch(self, step, shardings)
CausalLMLoader.batch = fail
sys.exit(main())
"""


def listening(pid: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses at which a process listens, by Linux."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except OSError:  # closed meanwhile
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in inodes:
                digits = bytes.fromhex(fields[1].partition(":")[0])
                words = [digits[i : i + 4][::-1] for i in range(0, len(digits), 4)]  # as this host orders bytes
                found.append(ipaddress.ip_address(b"".join(words)))
    return found


def is_local(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux alone lists sockets in /proc/net/tcp")
def test_a_job_on_one_host_listens_on_it_alone_and_writes_no_secret(tmp_path):
    with Job(tmp_path / "run", "train.steps=100000", **SECRETS) as job:
        job.wait_for("step 12/")
        addresses = [listening(process.pid) for process in job.processes]
        assert addresses[0] and all(is_local(address) for each in addresses for address in each), addresses
        for process in job.processes:
            process.terminate()
        assert job.exit_codes() == [3, 3]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "status.json", "record.json", "run.0", "run.1"} <= {path.name for path in files}
    assert not [path for path in files if b"sekret" in path.read_bytes()]


@pytest.mark.slow
def test_an_error_of_one_process_is_told_once_and_ends_both(tmp_path):
    with Job(tmp_path / "run", "train.steps=100000", program=FAILING_LOADER) as job:
        job.wait_for("step 1/")
        assert [process.wait(30) for process in reversed(job.processes)] == [1, 1]
    first, second = (output.read_text() for output in job.outputs)
    assert second.count("ValueError: a fault of this process alone") == 1 and "Traceback" not in first
    assert "process 1 on " in first and "failed with exit code 1: see its output." in first


@pytest.mark.slow
def test_processes_that_see_other_directories_all_leave(tmp_path):
    program = (
        "import spmd_lm.training.run_dir as r, spmd_lm.cli, sys; r.SHARED_SECONDS = 1; sys.exit(spmd_lm.cli.main())"
    )
    with Job(tmp_path / "run", program=program, apart=True) as job:
        assert job.exit_codes() == [2, 2]
    for output in job.outputs:
        assert "process 1 on " in output.read_text() and "do not see the same directory" in output.read_text()


@pytest.mark.slow
def test_a_part_that_one_process_reads_is_damage_for_both(tmp_path):
    """The processes wait for each other for a moment at most."""
    with Job(tmp_path / "run", "train.steps=11", "parallel.zero=3") as job:
        assert job.exit_codes() == [0, 0]
    for part in (tmp_path / "run" / "checkpoints" / "11" / "state" / "ocdbt.process_1" / "d").iterdir():
        content = part.read_bytes()
        part.write_bytes(content[:1000] + bytes(len(content) - 2000) + content[-1000:])
    with Job(tmp_path / "run", "train.steps=12", "parallel.zero=3") as job:
        assert job.exit_codes() == [0, 0]
    first = job.outputs[0].read_text()
    assert "11 is damaged" in first and "It was moved to 11.corrupt." in first and "resuming after step 10" in first


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 2])
def test_processes_that_keep_state_in_files_make_the_same_run(zero, tmp_path):
    """Each its own files, also of what all have; and one checkpoint, in which everything is counted once."""
    keys = ["train.steps=10", "parallel.data=4", f"parallel.zero={zero}"]
    for name in ("disk", "none"):
        with Job(tmp_path / name, *keys, f"optim.offload={name}") as job:
            assert job.exit_codes() == [Exit.DONE, Exit.DONE], [path.read_text() for path in job.outputs]
    runs = [tmp_path / name for name in ("disk", "none")]
    assert losses(runs[0]) == losses(runs[1])
    assert main(["ckpt", "diff", *(f"{run}@10" for run in runs)]) == Exit.DONE
    assert len([*(runs[0] / "checkpoints/10").glob("group-*.safetensors")]) == 2 and not (runs[0] / "offload").exists()
