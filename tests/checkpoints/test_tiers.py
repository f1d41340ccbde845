"""Local checkpoints: a run resumes from the newest of either tier, and from a local one only if it is its own."""

import json
import os
import random
import shutil

import jax
import pytest

from spmd_lm.checkpoints import inspection
from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.parts import part_directories, part_directory
from spmd_lm.checkpoints.storage import SHARDS_FILE, ShardStorage
from spmd_lm.cli import main
from spmd_lm.errors import ConfigError, Exit, OutputError
from spmd_lm.files import require_own
from spmd_lm.training import loop
from tests.checkpoints.test_checkpointer import META, abstract, make_mesh, make_state
from tests.helpers import assert_equal
from tests.reliability.jobs import Job, losses
from tests.training import test_loop
from tests.training.test_loop import FakeProgram, make_config, status

fake = test_loop.fake  # no step is compiled


class KilledError(Exception):
    pass


def kill():
    raise KilledError


def config_with_local(tmp_path, name="run", **changes):
    """Durable checkpoints every 5 of 12 steps, local ones every 2."""
    local = {"dir": str(tmp_path / "memory"), "every": 2, "keep": 2}
    tree = {"every": 5, "keep": 2, "local": local} | changes
    return make_config(tmp_path / name, **{f"checkpoint__{key}": value for key, value in tree.items()})


def train_until(config, step):
    FakeProgram.at = {step: kill}
    with pytest.raises(KilledError):
        loop.train(config)
    FakeProgram.at = {}


def parts(tmp_path):
    (run,) = (tmp_path / "memory").iterdir()
    return run / "0-of-1"


@pytest.fixture
def killed(tmp_path):
    """A run that ended after step 8, with local checkpoints of 6 and 8, and a durable one of step 5."""
    config = config_with_local(tmp_path)
    train_until(config, 9)
    assert sorted(path.name for path in parts(tmp_path).iterdir()) == ["6", "8"]
    return config


@pytest.fixture
def undisturbed(tmp_path):
    assert loop.train(make_config(tmp_path / "undisturbed")) is Exit.DONE
    return losses(tmp_path / "undisturbed")


def flip_a_bit(path):
    raw = bytearray(path.read_bytes())
    raw[-random.Random(0).randrange(1, 64)] ^= 16
    path.write_bytes(raw)


def test_a_run_resumes_from_the_newest(tmp_path, killed, undisturbed, capsys):
    assert loop.train(killed) is Exit.DONE
    assert f"resuming after step 8 of 12, from {parts(tmp_path)}/8" in capsys.readouterr().out
    assert losses(tmp_path / "run") == undisturbed
    assert status(tmp_path / "run")["saved_step"] == 12
    assert loop.train(config_with_local(tmp_path)) is Exit.DONE  # and once more: from the durable one of step 12


def test_a_damaged_local_checkpoint_is_passed_over(tmp_path, killed, undisturbed, capsys):
    flip_a_bit(parts(tmp_path) / "8" / SHARDS_FILE)
    assert loop.train(killed) is Exit.DONE
    out = capsys.readouterr().out
    assert "8 is damaged" in out and "It was moved to 8.corrupt" in out and "resuming after step 6" in out
    assert losses(tmp_path / "run") == undisturbed


def test_without_its_host_s_memory_a_run_resumes_from_the_durable_one(tmp_path, killed, undisturbed, capsys):
    shutil.rmtree(tmp_path / "memory")
    assert loop.train(killed) is Exit.DONE
    assert "resuming after step 5 of 12\n" in capsys.readouterr().out
    assert losses(tmp_path / "run") == undisturbed


def test_another_run_s_are_ignored_aloud(tmp_path, killed, capsys):
    assert loop.train(config_with_local(tmp_path, "other")) is Exit.DONE
    out = capsys.readouterr().out
    assert "local checkpoints of another run" in out and "starting" in out


def test_what_the_run_left_behind_is_not_taken_up_again(tmp_path, killed, capsys):
    """A host that was away for one start, in which the run went another way from an earlier step."""
    away = shutil.move(tmp_path / "memory", tmp_path / "away")
    train_until(config_with_local(tmp_path, local=None), 7)  # from step 5, without a checkpoint
    shutil.rmtree(tmp_path / "memory", ignore_errors=True)
    shutil.move(away, tmp_path / "memory")
    assert loop.train(killed) is Exit.DONE
    out = capsys.readouterr().out
    assert "resuming after step 8" not in out and "resuming after step 5 of 12" in out
    assert out.count("the run does not go on from there: deleted") == 2


def test_a_directory_that_cannot_be_used_is_told_at_the_start(tmp_path):
    (tmp_path / "memory").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint.local.dir=.*memory: File exists"):
        loop.train(config_with_local(tmp_path))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_directory_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory").chmod(0o777)
    with pytest.raises(ConfigError, match=r"checkpoint.local.dir=.*other users can write to it: chmod 700 it"):
        loop.train(config_with_local(tmp_path))
    (tmp_path / "memory").chmod(0o1777)  # as /dev/shm
    assert loop.train(config_with_local(tmp_path)) is Exit.DONE


@pytest.mark.parametrize(
    ("modes", "refused"),
    [
        ({"a": 0o777}, True),
        ({"a/b": 0o777}, True),
        ({"a": 0o1777, "a/b": 0o700}, False),  # as /tmp
        ({"a": 0o1777, "a/b": 0o777}, True),
        ({"a": 0o755}, False),
        ({"a": 0o2775}, True),  # a group's, of which the user is one
    ],
)
def test_a_directory_below_one_that_others_can_write_to_is_refused(tmp_path, monkeypatch, modes, refused):
    """They could put another one in its place."""
    monkeypatch.setattr("grp.getgrgid", {}.__getitem__)  # not of this user alone
    (tmp_path / "a" / "b" / "memory").mkdir(parents=True, mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    for name, mode in modes.items():
        (tmp_path / name).chmod(mode)
    for directory in (tmp_path / "a/b/memory", tmp_path / "link/memory"):
        if refused:
            with pytest.raises(OSError, match="other users can write to it: chmod go-w it"):
                require_own(directory)
        else:
            require_own(directory)


def test_a_failed_local_save_ends_the_run_with_a_durable_one(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spmd_lm.checkpoints.storage.create", fail)
    sentence = r"(?s)0-of-1/2 was not saved: OSError: .*No space left.*Make room there.* Step \d is saved"
    with pytest.raises(OutputError, match=sentence) as told:
        loop.train(config_with_local(tmp_path))
    assert told.value.code == Exit.CONFIG
    (step,) = Checkpointer(tmp_path / "run" / "checkpoints").steps()
    assert step in (2, 3, 4)  # the host runs ahead


def test_a_truncated_local_checkpoint_is_moved_aside(tmp_path, killed, capsys):
    os.truncate(parts(tmp_path) / "8" / SHARDS_FILE, 100)
    assert loop.train(killed) is Exit.DONE
    out = capsys.readouterr().out
    assert "resuming after step 6" in out and "8 is damaged: moved to 8.corrupt" in out


def test_ckpt_reads_both_tiers(tmp_path, killed, capsys):
    run = str(tmp_path / "run")

    def reports(*line):
        main(["ckpt", *line, run, "--json", "-"])
        return {(each["step"], each["tier"]): each for each in json.loads(capsys.readouterr().out)["checkpoints"]}

    capsys.readouterr()
    assert {key: each["state"] for key, each in reports("ls").items()} == {
        (5, "durable"): "intact",
        (6, "local"): "intact",
        (8, "local"): "intact",
    }
    flip_a_bit(parts(tmp_path) / "8" / SHARDS_FILE)
    assert main(["ckpt", "verify", run]) == Exit.CHECK_FAILED
    capsys.readouterr()
    verified = reports("verify")
    assert [verified[6, "local"]["state"], verified[8, "local"]["state"]] == ["intact", "damaged"]


def test_of_parts_that_are_elsewhere_nothing_is_claimed(tmp_path):
    for process in (0, 1):
        part = Checkpointer(part_directory(str(tmp_path), "run", process, 2), storage=ShardStorage())
        part.save(7, make_state(mesh=make_mesh(4, 2)), META)
        part.close()
    saved = Checkpointer(part_directory(str(tmp_path), "run", 0, 2), storage=ShardStorage(all_parts=True))
    assert inspection.verify(saved, 7)["state"] == "intact"
    (other,) = (path for path in part_directories(str(tmp_path), "run") if path != saved.directory)
    flip_a_bit(other / "7" / SHARDS_FILE)
    assert inspection.verify(saved, 7)["state"] == "intact"  # each has all of this state: one part is enough
    shutil.rmtree(other)
    report = inspection.verify(saved, 7)
    assert report["state"] == "uncommitted" and "on other hosts" in report["problem"]
    os.truncate(saved.path(7) / SHARDS_FILE, 100)
    assert inspection.verify(saved, 7)["state"] == "damaged"


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (1,), (4, 2)])
def test_shards_are_put_together_for_any_layout(tmp_path, sizes):
    checkpoints = Checkpointer(tmp_path, storage=ShardStorage())
    checkpoints.save(7, state := make_state(mesh=make_mesh(4, 2)), META)
    checkpoints.close()
    restored = checkpoints.restore(7, abstract(state, make_mesh(*sizes)))
    assert checkpoints.meta(7) == META
    assert_equal(jax.device_get(restored), jax.device_get(state))


@pytest.mark.slow
def test_a_step_counts_if_every_process_has_its_part(tmp_path):
    local = f"checkpoint.local={{dir: {tmp_path / 'memory'}, every: 2, keep: 3}}"
    with Job(tmp_path / "alone", "train.steps=20") as alone:
        assert alone.exit_codes() == [0, 0]
    with Job(tmp_path / "run", "train.steps=20", "train.batch=16", local) as job:
        job.wait_for("step 17/")
        for process in job.processes:
            process.kill()
    (memory,) = (tmp_path / "memory").iterdir()
    saved = [{int(path.name) for path in part.iterdir() if path.name.isdecimal()} for part in sorted(memory.iterdir())]
    *_, expected, newest = sorted(saved[0] & saved[1])  # killed while one may be a save ahead of the other
    for step in saved[1]:
        if step >= newest:
            shutil.rmtree(memory / "1-of-2" / str(step))
    with Job(tmp_path / "run", "train.steps=20", "train.batch=16", local) as job:
        assert job.exit_codes() == [0, 0]
        assert f"resuming after step {expected} of 20, from" in job.outputs[0].read_text()
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
