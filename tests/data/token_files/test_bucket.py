"""Shards in a bucket are read as those on disk, through a cache: the same tokens, or an error that names the object."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from spmd_lm.buckets.bucket import Bucket, Found
from spmd_lm.buckets.copies import _is_copied, directory_of
from spmd_lm.config.load import load
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.data.loader import batches_ahead
from spmd_lm.data.token_files import bucket_tokens
from spmd_lm.data.token_files.bucket_tokens import BlockCache
from spmd_lm.data.token_files.shard import BLOCK, open_shard
from spmd_lm.errors import ConfigError, DataError, Exit
from spmd_lm.step.program import Program
from tests import processes
from tests.buckets.server import BucketServer
from tests.data.token_files.conftest import write_dataset

KEY = "sets/tokens"
SMALL = ["model.layers=1", "model.width=8", "model.heads=1", "model.context=64", "model.vocab=256", "optim.lr=0.1"]
SMALL += ["train.batch=8", "train.steps=4", "data.source=tokens"]


@pytest.fixture(scope="module")
def server():
    with BucketServer() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Two shards of 2 and a bit MiB, and one small one; bytes as ids of 16 bits."""
    rng = np.random.default_rng(0)
    shards = [[rng.integers(0, 255, BLOCK + 10)], [rng.integers(0, 255, BLOCK + 99)]]
    splits = {"train": shards, "validation": [[rng.integers(0, 255, 9000)]], "test": [[rng.integers(0, 255, 900)]]}
    return write_dataset(tmp_path_factory.mktemp("original") / "tokens", splits, vocab=256, eos=255)


@pytest.fixture
def bucket(server, original, tmp_path, monkeypatch):
    """The server with the data set at KEY, for both schemes, and no copy or cache of it here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for scheme in ("s3", "gs"):
        for name, value in server.environment(scheme).items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("spmd_lm.buckets.copies.Bucket", functools.partial(Bucket, retry_seconds=0.2))
    upload(server, original)
    yield server
    server.faults.clear()


def upload(server: BucketServer, directory: Path) -> None:
    for key in server.objects("bucket"):
        server.delete("bucket", key)
    for path in directory.rglob("*.*"):
        server.put("bucket", f"{KEY}/{path.relative_to(directory)}", path.read_bytes())
    server.requests.clear()


def rows(path: str | Path, steps: int = 3, **data) -> list[np.ndarray]:
    config = load(None, [*SMALL, f"data.path={path}", *(f"data.{key}={value}" for key, value in data.items())])
    loader = make_loader(config, load_data(config.data, 5, 256), "training")
    return [loader.rows(step, 0, 8).tokens for step in range(steps)]


def asked_for_tokens(server: BucketServer) -> int:
    return sum(path.endswith(".bin") for _, path, _ in server.requests)


@pytest.mark.parametrize("verify", ["touch", "full", "off"])
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_rows_are_those_on_disk_and_a_second_start_fetches_none(scheme, verify, bucket, original):
    address = f"{scheme}://bucket/{KEY}"
    np.testing.assert_equal(rows(address, verify=verify), rows(original, verify=verify))
    assert 3 <= asked_for_tokens(bucket) <= 7  # blocks there are
    assert not [*directory_of(address).rglob("*.bin")]
    bucket.requests.clear()
    rows(address, verify=verify)
    assert [path.partition("?")[0] for _, path, _ in bucket.requests] == ["/bucket"] * 2  # its listings
    datasets = (load_data(load(None, [*SMALL, f"data.path={path}"]).data, 5, 256) for path in (address, original))
    assert len({dataset.fingerprint for dataset in datasets}) == 1


def test_a_slice_of_many_blocks_is_whole(bucket, original):
    config = load(None, [*SMALL, f"data.path=s3://bucket/{KEY}"])
    tokens = load_data(config.data, 5, 256).corpora[0].train
    expected = np.concatenate([open_shard(original / f"train/shard-0000{i}").tokens for i in (0, 1)])
    np.testing.assert_array_equal(tokens.read(np.zeros(1, np.int64), tokens.size)[0], expected)
    shard = tokens.shards[0].tokens
    for part in (slice(0, 0), slice(5, 3), slice(BLOCK // 2 - 1, BLOCK // 2 + 1), slice(-3, None), slice(None, 10**9)):
        np.testing.assert_array_equal(shard[part], expected[: shard.size][part])


def flip(data: bytes, at: int = 9) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("train/shard-00001.bin", flip, "damaged: the checksum of bytes 0 to 1,048,576"),
        ("train/shard-00001.bin", lambda data: data[:-2], "damaged: it has"),
        ("train/shard-00001.bin", None, "damaged: it is missing"),
        ("train/shard-00000.idx", lambda data: flip(data, 10), "damaged: its checksum"),
        ("train/shard-00000.idx", None, "cannot be read: No such file"),
        ("train/shard-00000.json", lambda data: data[:-9], "damaged: not JSON"),
        ("validation/shard-00000.json", None, "cannot be read: No such file"),
        ("manifest.json", lambda data: b"{}", "damaged: it is not the manifest"),
    ],
)
@pytest.mark.parametrize("verify", ["touch", "off"])
def test_damage_is_told_with_the_object(name, change, said, verify, bucket, original):
    rows(f"s3://bucket/{KEY}", 1)  # what was right before is here
    if change:
        bucket.put("bucket", f"{KEY}/{name}", change((original / name).read_bytes()))
    else:
        bucket.delete("bucket", f"{KEY}/{name}")
    with pytest.raises(DataError, match=f"^s3://bucket/{KEY}/{name}: {said}"):
        rows(f"s3://bucket/{KEY}", verify=verify)


def test_what_is_no_data_set_is_told(bucket):
    bucket.delete("bucket", f"{KEY}/manifest.json")
    with pytest.raises(DataError, match=rf"^s3://bucket/{KEY}: no manifest.json there.* on disk alone"):
        rows(f"s3://bucket/{KEY}")
    with pytest.raises(DataError, match=r"^gs://no-such-bucket/tokens/tokenizer: no such object, or no such bucket"):
        rows("gs://no-such-bucket/tokens")
    with pytest.raises(ConfigError, match="after the bucket's name write a key"):
        rows("s3://bucket")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"status": 403}, "(the server answers 403|the credentials in the environment)"),
        ({"status": 500}, "the server answers 500"),
        ({"down": True}, ""),
    ],
)
def test_what_the_server_refuses_is_told(fault, said, bucket):
    where = "s3://bucket/" + KEY
    with bucket.failing(**fault), pytest.raises(DataError, match=f"^{where}.*{said}.*Mend that, and start again"):
        rows(where)
    of_tokens = fault | {"where": lambda method, path: path.endswith(".bin")}
    with bucket.failing(**of_tokens), pytest.raises(DataError, match=rf"^{where}/train/shard-0000\d.bin: .*{said}"):
        rows(where)
    rows(where)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_for_a_moment_is_waited_for(status, bucket, original, monkeypatch):
    monkeypatch.setattr("spmd_lm.buckets.copies.Bucket", Bucket)
    with bucket.failing(status=status, times=3) as fault:
        np.testing.assert_equal(rows(f"gs://bucket/{KEY}", 1), rows(original, 1))
    assert fault.times == 0


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_an_object_that_is_replaced_gives_no_other_tokens(scheme, bucket, original):
    config = load(None, [*SMALL, f"data.path={scheme}://bucket/{KEY}"])
    loader = make_loader(config, load_data(config.data, 5, 256), "training")
    for i in (0, 1):
        name = f"train/shard-0000{i}.bin"
        bucket.put("bucket", f"{KEY}/{name}", flip((original / name).read_bytes(), -9))
    with pytest.raises(DataError, match=r"/shard-0000\d.bin: it was replaced while it was read"):
        loader.rows(0, 0, 8)


def test_a_prepared_vocabulary_is_copied_and_replaced_with_the_bucket_s(bucket, original, tmp_path):
    address = f"s3://bucket/{KEY}"
    bucket.put("bucket", f"{KEY}/tokenizer/vocab.txt", b"[UNK]\n[CLS]\n")
    bucket.put("bucket", f"{KEY}/other.html", b"not copied")
    config = load(None, [*SMALL, f"data.path={address}"])
    assert config.data.tokenizer == str(directory_of(address) / "tokenizer")
    copy = Path(config.data.tokenizer, "vocab.txt")
    assert copy.read_bytes() == b"[UNK]\n[CLS]\n"
    copy.write_bytes(b"[UNK]\n[CLS]!")  # of the same size
    load(None, [*SMALL, f"data.path={address}"])
    assert copy.read_bytes() == b"[UNK]\n[CLS]\n"
    bucket.put("bucket", f"{KEY}/tokenizer/vocab.txt", b"[UNK]\n[SEP]\n")
    load(None, [*SMALL, f"data.path={address}"])
    assert copy.read_bytes() == b"[UNK]\n[SEP]\n"
    with pytest.raises(ConfigError, match=f"not the one that made the token ids in {address}. Leave"):
        rows(address)
    bucket.requests.clear()
    load(None, [*SMALL, f"data.path={address}", "data.tokenizer=bytes"])
    assert not bucket.requests  # a run knows its own
    bucket.delete("bucket", f"{KEY}/tokenizer/vocab.txt")
    rows(address, 1)
    assert not copy.exists() and not [*tmp_path.rglob("*.html")]


def test_no_copy_is_outside_its_directory(bucket):
    assert _is_copied("a/b.json", Found(1, {}))
    for name in ("../b.json", "/b.json", "a//b.json", "tokenizer/../../b", "a/./b.idx", "a\0.json"):
        assert not _is_copied(name, Found(1, {}))
    bucket.put("bucket", f"{KEY}/tokenizer/../../../../b.json", b"{}")
    with pytest.raises(DataError, match="as no file has: remove it"):  # obstore has none
        rows(f"s3://bucket/{KEY}")


# The cache.


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_the_cache_keeps_its_limit_and_what_was_read_last(tmp_path):
    caches = [BlockCache(tmp_path, 64_000) for _ in range(2)]  # of two processes
    for n in range(300):
        caches[n % 2].write(f"b{n}", bytes([n % 256]) * 1000)
        assert caches[0].read("b0", 3, 5) == b"\0\0"  # again and again
        assert size(tmp_path) <= 64_000
    assert not caches[0].has("b1") and caches[1].read("b299", 999, 2000) == b"+"
    assert caches[0].read("b1", 0, 10) == b"" and size(tmp_path) > 32_000
    BlockCache(tmp_path, 4000)
    assert size(tmp_path) <= 4000


def test_the_cache_takes_no_more_than_half_of_what_the_disk_has_free(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 8, 6000))
    assert BlockCache(tmp_path).limit == 3000


def test_a_cache_smaller_than_a_batch_gives_the_same_rows(bucket, original, monkeypatch):
    monkeypatch.setattr(bucket_tokens, "CACHE_BYTES", 2 * BLOCK)
    np.testing.assert_equal(rows(f"s3://bucket/{KEY}"), rows(original))
    assert size(bucket_tokens.user_cache() / "blocks") <= 2 * BLOCK


@pytest.mark.parametrize("change", [flip, lambda data: data[:-1], lambda data: b""])
def test_damage_of_the_cache_is_fetched_again(change, bucket, original):
    address = f"s3://bucket/{KEY}"
    rows(address, verify="full")
    files = [*(bucket_tokens.user_cache() / "blocks").iterdir()]
    for file in files:
        file.write_bytes(change(file.read_bytes()))
    bucket.requests.clear()
    np.testing.assert_equal(rows(address, verify="off"), rows(original, verify="off"))
    assert 3 <= asked_for_tokens(bucket) <= len(files)


def test_a_full_disk_is_told(bucket, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DataError, match=r"^/.*/cache/spmd_lm/blocks/.*: No space left on device. Mend that"):
        rows(f"s3://bucket/{KEY}")


# Training.


def test_losses_are_those_from_disk_bit_for_bit(bucket, original):
    base = load(None, [*SMALL, "model.context=16", f"data.path={original}"])
    laid_out = Program(base, jax.devices()[:1])

    def losses(path: str | Path) -> list[float]:
        config = base.model_copy(update={"data": base.data.model_copy(update={"path": str(path)})})
        loader = make_loader(config, load_data(config.data, 5, 256), "training")
        state, found = laid_out.init(), []
        with batches_ahead(loader, laid_out.batch_shardings, range(4)) as batches:
            for batch in batches:
                state, figures = laid_out.step(state, batch)
                found.append(float(figures["loss"]))
        return found

    expected = losses(original)
    assert len(set(expected)) == 4
    for scheme in ("s3", "gs"):
        bucket.requests.clear()
        assert losses(f"{scheme}://bucket/{KEY}") == expected and asked_for_tokens(bucket)


@pytest.mark.slow
def test_a_run_goes_on_when_its_data_has_moved_to_a_bucket(bucket, original, tmp_path):
    own = [*SMALL, "run.simulate_devices=8", "train.log_every=1", "train.eval_every=2", "checkpoint.every=2"]

    def train(name: str, path: str | Path, steps: int = 4) -> list[dict]:
        line = ["train", "configs/debug.yaml", *own, f"run.dir={tmp_path / name}", f"data.path={path}"]
        processes.run(*line, f"train.steps={steps}")
        records = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [{key: r[key] for key in r if "loss" in key or key in ("step", "grad_norm")} for r in records]

    expected = train("stays", original)
    assert len([each for each in expected if "eval_loss" in each]) >= 2
    train("moves", original, 2)
    assert train("moves", f"gs://bucket/{KEY}") == expected and asked_for_tokens(bucket)
    for task in ("validation", "test"):  # moved back, and read from the other kind of bucket
        scores = [
            processes.run("eval", tmp_path / "moves", "--task", task, "--json", "-", f"data.path={path}")
            for path in (original, f"s3://bucket/{KEY}")
        ]
        figures = [json.loads(each)["tasks"] for each in scores]
        assert figures[0] == figures[1]
    shutil.rmtree(bucket_tokens.user_cache() / "blocks")
    with bucket.failing(status=403, where=lambda method, path: path.endswith(".bin")):
        line = ["train", "configs/debug.yaml", *own, f"run.dir={tmp_path / 'down'}", f"data.path=s3://bucket/{KEY}"]
        process = processes.start(*line)
        _, said = processes.communicate(process)
    assert process.returncode == Exit.DATA and f"s3://bucket/{KEY}/train/shard-0000" in said
