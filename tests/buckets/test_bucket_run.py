"""What is sent and fetched of a run in a bucket, without training: runs here are files, checkpoints a record beside
state/x."""

import functools
import json
import os
import re
import shutil
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from spmd_lm.buckets.claim import LOCK, Claim
from spmd_lm.checkpoints import bucket_run as module
from spmd_lm.checkpoints.bucket_run import FETCHING, SENDING, TOKEN, BucketRun
from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.directories import CORRUPT, move_aside
from spmd_lm.checkpoints.record import CheckpointRecord
from spmd_lm.errors import ConfigError, DamagedCheckpointError, OutputError
from spmd_lm.files import walk_files
from spmd_lm.runtime.directories import lock_directory

KEY = "runs/a"
META = {"config": {}, "data": {"samples": 0, "fingerprint": ""}}


class Machine:
    """A user's cache on a machine.  Those of one test share the server."""

    def __init__(self, home: Path, address: str, monkeypatch):
        self.home, self.address, self.monkeypatch, self.lines = home, address, monkeypatch, []

    def run(self, **how) -> BucketRun:
        self.monkeypatch.setenv("XDG_CACHE_HOME", str(self.home))
        return BucketRun(self.address, self.lines.append, **how)

    @property
    def path(self) -> Path:
        return self.run().path

    @contextmanager
    def training(self, **how):
        run = self.run(**how)
        with lock_directory(run.path, self.lines.append, True), run.open():
            yield run

    def fetch(self, **how) -> Path:
        (run := self.run(**how)).fetch()
        return run.path

    def write(self, *steps: int, text: str = "1", state: str = "state") -> None:
        """A run's files, and its checkpoints of these steps."""
        write(self.path, *steps, text=text, state=state)


def write(path: Path, *steps: int, text: str = "1", state: str = "state") -> None:
    for step in steps:
        save(path, step, state)
    (path / "config.yaml").write_text(text)
    (path / "metrics.jsonl").write_text(text)
    (path / "tensorboard").mkdir(exist_ok=True)
    (path / "tensorboard" / "events").write_text(text)
    (path / "status.json").write_text(json.dumps({"saved": max(steps, default=-1), "text": text}))


def save(path: Path, step: int, state: str = "state") -> None:
    partial, final = path / "checkpoints" / f"{step}.saving", path / "checkpoints" / str(step)
    (partial / "state" / "d").mkdir(parents=True)
    (partial / "state" / "x").write_text(state)
    (partial / "state" / "d" / "y").write_text(f"{step}")
    files = {"state/x": len(state), "state/d/y": len(str(step))}
    meta = META | {"state": state}
    CheckpointRecord(step=step, run_id="0" * 16, meta=meta, leaves={}, files=files).write(partial)
    partial.rename(final)


def remove(path: Path, step: int) -> None:
    (doomed := path / "checkpoints" / f"{step}.deleting").parent.mkdir(exist_ok=True)
    (path / "checkpoints" / str(step)).rename(doomed)
    module.delete(doomed)


def contents(path: Path) -> dict[str, bytes]:
    """Files of a working copy that the bucket also has."""
    own = (TOKEN, FETCHING, LOCK)
    files = (each for each in walk_files(path) if each.name not in own and SENDING not in each.parts)
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def steps(path: Path) -> list[int]:
    return sorted(int(each.name) for each in (path / "checkpoints").glob("*") if each.name.isdecimal())


@pytest.fixture(params=["gs"])
def scheme(request):
    """One of both, between which only the client differs, and training in test_train_in_bucket.py."""
    return request.param


@pytest.fixture
def machines(server, scheme, tmp_path, monkeypatch):
    """Makes machines."""
    monkeypatch.setattr(module, "SENT_EVERY", 0.1)
    monkeypatch.setattr(module, "LAST_SECONDS", 0.0)
    monkeypatch.setattr(module, "Claim", functools.partial(Claim, renewal=0.05, expiry=0.3))
    monkeypatch.setattr(module, "Bucket", functools.partial(quick, module.Bucket))
    return lambda name, key=KEY: Machine(tmp_path / name, f"{scheme}://bucket/{key}", monkeypatch)


def quick(bucket, address: str, **_: float):
    return bucket(address, request_seconds=5.0, retry_seconds=0.2)


@pytest.fixture
def one(machines):
    return machines("one")


@pytest.fixture
def two(machines):
    return machines("two")


@pytest.fixture
def objects(server):
    """The run's objects but the lock, by name, at the time of the call."""
    return lambda: {
        name.removeprefix(f"{KEY}/"): content
        for name, content in server.objects("bucket", f"{KEY}/").items()
        if name != f"{KEY}/{LOCK}"
    }


def written(server) -> list[str]:
    """Names in the order in which they were written or deleted, the lock's left out."""
    names = [
        f"{'-' * (method == 'DELETE')}{path.partition('?')[0].removeprefix(f'/bucket/{KEY}/')}"
        for method, path, _ in server.requests
        if method in ("PUT", "POST", "DELETE")
    ]
    return [name for name in names if LOCK not in name]


def wait_until(happened) -> None:
    """Waits for a thread of this process, which pytest's own limit ends if it hangs."""
    while not happened():
        time.sleep(0.01)


# What is sent.


def test_metrics_are_sent_before_a_checkpoint_its_record_last_and_status_after_it(one, server, objects):
    with one.training():
        one.write(4)
    assert objects() == contents(one.path)
    names = [name for name in written(server) if "tensorboard" not in name]
    assert {*names[2:4]} == {"checkpoints/4/state/x", "checkpoints/4/state/d/y"}
    assert {*names[:2]} == {"config.yaml", "metrics.jsonl"}
    assert names[4:] == ["checkpoints/4/record.json", "status.json"]


def test_what_is_new_is_sent_while_the_run_goes_on(one, objects):
    with one.training():
        one.write(4)
        wait_until(lambda: "status.json" in objects())
        one.write(5, text="22")
        wait_until(lambda: objects()["status.json"] == (one.path / "status.json").read_bytes())
        assert objects()["metrics.jsonl"] == b"22"
    assert not one.lines


def test_what_did_not_change_is_sent_once(one, two, server):
    with one.training():
        one.write(4)
    server.requests.clear()
    with two.training():
        wait_until(lambda: len(server.requests) > 20)
    assert not written(server)


def test_what_belongs_to_this_machine_is_not_sent(one, objects):
    with one.training():
        one.write()
        for name in ("offload/x", "checkpoints/4.saving/record.json", "config.yaml.tmp"):
            (one.path / name).parent.mkdir(exist_ok=True, parents=True)
            (one.path / name).write_text("1")
        (one.path / "link").symlink_to("/etc/passwd")
    assert {*objects()} == {"config.yaml", "metrics.jsonl", "status.json", "tensorboard/events"}


def test_older_checkpoints_are_deleted_once_the_newer_ones_are_there(one, server, objects):
    with one.training(keep=2):
        one.write(1, 2)
        wait_until(lambda: "checkpoints/2/record.json" in objects())
        with server.failing(status=500, where=lambda method, path: "checkpoints/3/state" in path):
            one.write(3)
            remove(one.path, 1)
            wait_until(lambda: one.lines)
            assert "checkpoints/1/record.json" in objects()
        wait_until(lambda: "checkpoints/1/state/x" not in objects())
    assert {name.split("/")[1] for name in objects() if name.startswith("checkpoints/")} == {"2", "3"}
    names = written(server)
    deleted = [name for name in names if name.startswith("-")]
    assert deleted[0] == "-checkpoints/1/record.json" and len(deleted) == 4  # it is told twice
    assert names.index(deleted[0]) > names.index("checkpoints/3/record.json")


def test_kept_best_is_not_deleted(one, objects):
    with one.training(wanted="every"):
        one.write(1, 2, 3)  # 1: the best, which is here
        wait_until(lambda: "checkpoints/3/record.json" in objects())
    assert "checkpoints/1/record.json" in objects()


def test_a_checkpoint_that_training_deletes_meanwhile_is_sent(one, server, objects):
    """If each took longer to send than training to save the next, none would ever be there."""
    slow = {"delay": 5.0, "where": lambda method, path: "checkpoints/1/state" in path}
    with one.training(), server.failing(**slow) as fault:
        one.write(1)
        wait_until(lambda: any("checkpoints/1/state" in path for _, path, _ in server.requests))
        remove(one.path, 1)
        fault.ended.set()
        wait_until(lambda: "checkpoints/1/record.json" in objects())
    assert objects()["checkpoints/1/state/x"] == b"state"
    assert not (one.path / SENDING).exists()


# What is fetched.


@pytest.mark.parametrize("reads", [True, False])
def test_another_machine_fetches_all(reads, one, two, objects):
    with one.training(keep=2):
        one.write(4, 5)
    if reads:
        two.fetch()
        assert not two.fetch(wanted="every") or steps(two.path) == [4, 5]
        remove(two.path, 4)
    else:
        with two.training(keep=2):
            assert steps(two.path) == [5]
    assert contents(two.path) == {name: c for name, c in objects().items() if not name.startswith("checkpoints/4/")}


def test_the_latest_copy_is_not_overwritten(one, server):
    with one.training():
        one.write(4)
    one.write(5, text="unsent")
    server.put("bucket", f"{KEY}/metrics.jsonl", b"damage")
    before = contents(one.path)
    assert contents(one.fetch()) == before
    with one.training():
        assert contents(one.path) == before
    assert server.objects("bucket")[f"{KEY}/metrics.jsonl"] == b"unsent"


def test_a_stale_copy_is_replaced(one, two, objects):
    with one.training():
        one.write(4)
    with two.training():
        two.write(5, text="two")
        remove(two.path, 4)
    one.write(6, text="went another way")
    (one.path / "samples.txt").write_text("of that way")
    with one.training():
        assert (one.path / "checkpoints/6.foreign/state/x").read_text() == "state"
        shutil.rmtree(one.path / "checkpoints/6.foreign")
        assert contents(one.path) == objects() == contents(two.path)
    assert any(line.endswith("went on without it: moved to 6.foreign.") for line in one.lines)


def test_a_checkpoint_of_the_same_step_and_another_state_is_replaced(one, two, objects):
    with one.training():
        one.write(4)
    with two.training():
        remove(two.path, 4)
        two.write(4, state="other")
    assert (one.fetch() / "checkpoints/4/state/x").read_text() == "other" == objects()["checkpoints/4/state/x"].decode()


def test_a_copy_that_was_killed_while_it_fetched_is_not_the_latest(one, two, server, objects):
    with one.training():
        one.write(4)
    server.faults.add(status=500, where=lambda method, path: "state/d" in path)
    with pytest.raises(ConfigError), two.training():
        pass
    server.faults.clear()
    assert steps(two.path) == []
    for _ in range(2):
        with two.training():
            assert contents(two.path) == objects()
            assert steps(two.path) == [4]
    assert {line.split(",")[0] for line in two.lines} == {f"{two.address}: fetching the checkpoint of step 4"}


def test_a_running_runs_copy_is_left_alone(one, server):
    with one.training():
        one.write(4, text="own")
        server.requests.clear()
        one.fetch()
        assert contents(one.path)["metrics.jsonl"] == b"own"


def test_what_was_removed_from_the_bucket_is_not_removed_here(one, server):
    with one.training():
        one.write(4)
    for name in server.objects("bucket"):
        server.delete("bucket", name)
    before = contents(one.path)
    with pytest.raises(ConfigError, match=r"no config\.yaml there, so it is not a run"):
        one.fetch()
    with pytest.raises(ConfigError, match=r"is gone, but for .*: nothing was changed"), one.training():
        pass
    assert contents(one.path) == before


def test_what_no_run_wrote_is_refused_and_kept(one, server):
    server.put("bucket", f"{KEY}/config.yaml", b"foreign")
    server.put("bucket", f"{KEY}/data/1", b"foreign")
    for _ in range(2):
        told = r"neither a status\.json nor a checkpoint: it belongs to no run"
        with pytest.raises(ConfigError, match=told), one.training():
            pass
    assert {content for name, content in server.objects("bucket").items() if LOCK not in name} == {b"foreign"}
    assert not contents(one.path)


def test_an_address_without_a_run_is_told(one):
    with pytest.raises(ConfigError, match=f"/{KEY}: no config.yaml there, so it is not a run"):
        one.fetch()


def test_a_start_that_was_killed_is_no_obstacle(one, two, server, objects):
    """Before its status.json was sent: another machine starts anew."""
    server.faults.add(status=500, where=lambda method, path: "status.json" in path)
    with pytest.raises(OutputError), one.training():
        one.write()
    server.faults.clear()
    assert "metrics.jsonl" in objects() and "status.json" not in objects()
    with two.training():
        assert not contents(two.path)
        two.write(1)
    assert contents(two.path).items() <= objects().items()


HOSTILE = ["../../x", "checkpoints/1/../../x", "a//b"]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("writes", [True, False])
def test_a_name_that_leads_out_of_the_directory_is_refused(name, writes, one, two, server, tmp_path):
    with one.training():
        one.write(1)
    server.put("bucket", f"{KEY}/{name}", b"hostile")
    with pytest.raises(ConfigError, match="a name with an empty part"), two.training() if writes else nullcontext():
        two.fetch()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"hostile"]


def test_names_of_this_machines_files_are_not_fetched(one, two, server, tmp_path):
    with one.training():
        one.write(1)
    names = [TOKEN, FETCHING, f"{SENDING}/1/x", "offload/x", "config.yaml.tmp", "nested/.lock", "nested/config.yaml"]
    for name in (*names, "checkpoints/x", "checkpoints/2/x", "checkpoints/01/record.json", "checkpoints/1.saving/x"):
        server.put("bucket", f"{KEY}/{name}", b"hostile")
    server.put("bucket", f"/{KEY}/absolute", b"hostile")
    with two.training():
        assert steps(two.path) == [1]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"hostile"]


def test_objects_that_stand_for_directories_are_no_obstacle(one, two, server):
    with one.training():
        one.write(1)
    for name in ("", "checkpoints/", "checkpoints/1/", "checkpoints/1/state/", "tensorboard/", "empty/"):
        server.put("bucket", f"{KEY}/{name}", b"")
    with two.training():
        assert contents(two.path) == contents(one.path)


def test_a_run_within_a_run_is_not_its_file(one, machines, objects):
    inner = machines("one", f"{KEY}/inner")
    with one.training(), inner.training():
        one.write(1)
        inner.write(2)
        wait_until(lambda: "inner/status.json" in objects() and "status.json" in objects())
    assert "inner/.token" not in objects() and json.loads(objects()[f"inner/{LOCK}"])["state"] == "released"
    with machines("two").training():
        assert not (machines("two").path / "inner").exists()


def test_an_object_replaced_after_it_was_listed_is_read_again(one, two, server, monkeypatch):
    with one.training():
        one.write(4)
    bucket, listed = module.Bucket, []

    def objects(self, under=""):
        found = real(self, under)
        if not listed:  # a running job quarantined it, and sent it again
            for name in ("checkpoints/4/state/x", "metrics.jsonl"):
                server.put("bucket", f"{KEY}/{name}", b"stat2")
        listed.append(under)
        return found

    kind = type(bucket(one.address))
    real = kind.objects
    monkeypatch.setattr(kind, "objects", objects)
    two.fetch()
    assert (two.path / "checkpoints/4/state/x").read_text() == "stat2" and len(listed) == 2


def test_a_checkpoint_deleted_after_it_was_listed_is_left_out(one, two, server, monkeypatch):
    with one.training():
        one.write(4)
    kind = type(module.Bucket(one.address))
    real, listed = kind.objects, []

    def objects(self, under=""):
        found = real(self, under)
        if not listed:
            for name in server.objects("bucket", f"{KEY}/checkpoints/4"):
                server.delete("bucket", name)
            for name, content in contents(other).items():
                server.put("bucket", f"{KEY}/{name}", content)
        listed.append(under)
        return found

    write(other := two.home.parent / "other", 5)
    monkeypatch.setattr(kind, "objects", objects)
    assert steps(two.fetch()) == [5]


@pytest.mark.parametrize("damage", [b"stat", None])
def test_a_damaged_object_is_found_by_its_size_and_moved_aside(damage, one, two, server, objects):
    with one.training(keep=2):
        one.write(4, 5)
    if damage is None:
        server.delete("bucket", f"{KEY}/checkpoints/5/state/x")
    else:
        server.put("bucket", f"{KEY}/checkpoints/5/state/x", damage)
    with two.training(keep=2) as run:
        checkpointer = Checkpointer(two.path / "checkpoints")
        for _ in range(2):  # fetched once more, and then moved aside there too
            assert checkpointer.latest_step() == 5
            with pytest.raises(DamagedCheckpointError, match=r"state/x (has 4 of 5 bytes|is missing)"):
                checkpointer.record(5)
            move_aside(checkpointer.path(5), CORRUPT)
            run.fetch_again(5)
        assert steps(two.path) == [4] and checkpointer.record(4).step == 4
    name = "checkpoints/5/record.json"
    assert f"{two.address}/{name}: of a damaged checkpoint, renamed to record.json{CORRUPT}." in two.lines
    assert f"{name}{CORRUPT}" in objects() and name not in objects()
    assert damage is None or objects()["checkpoints/5/state/x"] == damage
    assert "checkpoints/4/record.json" in objects()


def test_a_copy_damaged_here_is_fetched_again(one, two, objects):
    with one.training():
        one.write(4)
    with two.training() as run:
        (two.path / "checkpoints/4/state/x").write_text("stat")
        move_aside(two.path / "checkpoints/4", CORRUPT)
        run.fetch_again(4)
        assert (two.path / "checkpoints/4/state/x").read_text() == "state"
    assert "checkpoints/4/record.json" in objects()


def test_a_checkpoint_that_is_gone_here_alone_is_fetched_by_its_own_machine(one):
    """Its copy is the latest, and lacks what the bucket has, as after something emptied the cache in part."""
    with one.training():
        one.write(4)
    remove(one.path, 4)
    with one.training():
        assert steps(one.path) == [4]


# Faults while sending.


@pytest.mark.parametrize("requests", [0, 3, 5, 6, 7, 9])
def test_a_process_killed_in_the_middle_of_sending_loses_nothing(requests, one, two, server, objects):
    """Whether the next one is on the same machine or on another."""
    with one.training():
        one.write(4)
    left = [requests]

    def is_after(method, path):
        left[0] -= method != "GET" and LOCK not in path
        return left[0] < 0

    with suppress(OutputError), one.training():
        fault = server.faults.add(status=500, where=is_after)
        one.write(5, text="two")
        remove(one.path, 4)
    server.faults.end(fault)
    with two.training():
        (newest,) = steps(two.path)
        assert newest in (4, 5)
        assert Checkpointer(two.path / "checkpoints").record(newest)
        saved = json.loads((two.path / "status.json").read_text())["saved"]
        assert saved <= newest
        if newest == 5:
            assert (two.path / "metrics.jsonl").read_text() == "two"
    records = [name for name in objects() if name.endswith("record.json")]
    assert len(records) == len({name.split("/")[1] for name in objects() if name.startswith("checkpoints/")})


def test_the_same_machine_sends_what_a_killed_process_did_not(one, server, objects):
    with one.training():
        one.write(4)
    with server.failing(down=True), suppress(ConfigError), one.training():
        pass
    one.write(5, text="unsent")
    remove(one.path, 4)
    with one.training():
        pass
    assert objects() == contents(one.path) and "checkpoints/5/record.json" in objects()


def test_a_server_that_is_down_for_a_while_is_told_and_waited_for(one, server, objects):
    with one.training():
        one.write(4)
        wait_until(lambda: "status.json" in objects())
        with server.failing(down=True):
            one.write(5)
            wait_until(lambda: one.lines)
        wait_until(lambda: len(one.lines) > 1)
        assert objects() == contents(one.path) | objects()
        assert "checkpoints/5/record.json" in objects()
    down, up = one.lines
    what = "the server cannot be reached. The run goes on, and what it saves is sent when that ends."
    assert re.fullmatch(rf"{re.escape(one.address)}/.*: {re.escape(what)}", down)
    assert up == f"{one.address}: is there again; all is sent."


def test_a_server_that_is_down_at_the_end_fails_the_run(one, two, server, objects):
    with pytest.raises(OutputError) as caught, one.training():
        one.write(4)
        server.faults.add(down=True)
    server.faults.clear()
    expected = f"the server cannot be reached: not all of this run is there. {one.path} has all of it"
    assert f"{expected}: mend that, and train again on this machine." in str(caught.value)
    with one.training():
        pass
    assert objects() == contents(one.path)


def test_what_could_not_be_sent_of_a_failed_run_is_told(one, server):
    with pytest.raises(ZeroDivisionError), one.training():
        one.write(4)
        server.faults.add(down=True)
        raise ZeroDivisionError
    assert any("not all of this run is there" in line for line in one.lines)


@pytest.mark.parametrize("status", [403, 404])
def test_a_bucket_that_refuses_is_told_in_a_sentence(status, one, server):
    fault = server.faults.add(status=status, where=lambda method, path: method != "GET" or LOCK in path)
    with pytest.raises(ConfigError) as caught, one.training():
        pass
    server.faults.end(fault)
    what = {403: "the credentials in the environment do not allow that", 404: "no such object, or no such bucket"}
    end = "Mend that, and try again."
    assert str(caught.value) == f"{one.address}/{LOCK}: {what[status]}. {end}"
    assert server.SECRET not in str(caught.value) and server.ACCESS_KEY not in str(caught.value)
    with server.failing(status=status), pytest.raises(ConfigError, match=rf"^{one.address}.*{end}$"):
        one.fetch()


def test_a_claim_lost_to_another_ends_the_run(one, two, server, objects):
    with pytest.raises(OutputError, match="took it over"), one.training() as run:
        one.write(4)
        wait_until(lambda: "status.json" in objects())
        server.put("bucket", f"{KEY}/{LOCK}", json.dumps({"token": "two"}).encode())
        wait_until(lambda: not run._thread.is_alive())
        before = objects()
        one.write(5)
        with pytest.raises(OutputError):
            run.require()
    assert objects() == before


def test_a_holder_stopped_for_longer_than_its_claim_holds_writes_nothing(one, two, monkeypatch, objects):
    monkeypatch.setattr(module, "SENT_EVERY", 60.0)
    with pytest.raises(OutputError, match="took it over"), one.training() as run:
        run._claim.abandon()  # stands for the stop
        with two.training():
            two.write(4, text="two")
        one.write(5, text="one")
    assert objects() == contents(two.path)


def test_two_processes_of_one_machine_do_not_both_train(one):
    with one.training(), pytest.raises(ConfigError, match="is writing there"), one.training():
        pass


def test_two_machines_do_not_both_train(one, two):
    with one.training(), pytest.raises(ConfigError, match="is writing there"), two.training():
        pass


def test_ctrl_c_leaves_the_claim_to_expire(one, two, server):
    with suppress(KeyboardInterrupt), one.training():
        raise KeyboardInterrupt
    assert json.loads(server.objects("bucket")[f"{KEY}/{LOCK}"])["state"] == "held"
    with one.training():
        pass
    assert not one.lines


def test_an_unreadable_directory_is_told_while_sending(one, server, monkeypatch):
    with one.training():
        one.write(4)
        monkeypatch.setattr(module, "entries", lambda path: (_ for _ in ()).throw(module.UserError("cannot be read.")))
        wait_until(lambda: one.lines)
        monkeypatch.undo()
        wait_until(lambda: len(one.lines) == 2)
    assert one.lines[0] == "cannot be read. The run goes on, and what it saves is sent when that ends."


@pytest.mark.parametrize("where", ["unwritable", "no directory", "no home"])
def test_a_cache_that_cannot_be_written_is_told(where, one, tmp_path, monkeypatch):
    if where == "no directory":
        (tmp_path / "one").write_text("")
    elif where == "unwritable":
        if os.getuid() == 0:
            one.home = Path("/proc/nothing")
        else:
            (tmp_path / "one").mkdir(mode=0o500)
    else:
        monkeypatch.setattr(module, "working_copy", lambda address: Path("/dev/null/buckets/x"))
    with pytest.raises(ConfigError, match="Mend that, and try again"):
        one.fetch()
