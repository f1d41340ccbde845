"""The client of buckets, against both kinds of server: conditions, and errors told in our words alone."""

import errno
import time

import pytest

from spmd_lm.addresses import bucket_problem
from spmd_lm.buckets import bucket as module
from spmd_lm.buckets.bucket import Bucket, reason
from spmd_lm.errors import ConfigError

STATUSES = {
    403: (PermissionError, "the credentials in the environment do not allow that"),
    404: (FileNotFoundError, "no such object, or no such bucket"),
    412: (FileExistsError, "somebody else has written it"),
    429: (OSError, "the server answers 429 Too Many Requests"),
    500: (OSError, "the server answers 500 Internal Server Error"),
    503: (OSError, "the server answers 503 Service Unavailable"),
}


@pytest.fixture
def bucket(server, scheme):
    return Bucket(f"{scheme}://bucket/runs/a", retry_seconds=0.3)


def operations(bucket: Bucket, path):
    return {
        "objects": lambda: bucket.objects(),
        "read": lambda: bucket.read("x"),
        "read_range": lambda: bucket.read_range("x", 0, 1, {"e_tag": "x"}),
        "download": lambda: bucket.download("x", path),
        "write": lambda: bucket.write("x", b"1"),
        "copy": lambda: bucket.copy("x", "y"),
        "delete": lambda: bucket.delete("x"),
    }


def assert_no_secret(server, text: str) -> None:
    assert server.SECRET not in text and server.ACCESS_KEY not in text


def test_objects_are_written_listed_read_copied_and_deleted(bucket, server, tmp_path):
    server.put("bucket", "runs/ab", b"of another run")
    bucket.write("b/2", b"two")
    bucket.write("b/10", b"")
    (tmp_path / "file").write_bytes(b"from a file")
    bucket.write("a", tmp_path / "file")
    bucket.write("b2", b"beside b")
    assert {name: found.size for name, found in bucket.objects().items()} == {"a": 11, "b/10": 0, "b/2": 3, "b2": 8}
    assert [*bucket.objects()] == sorted(bucket.objects())
    assert [*bucket.objects("b")] == ["b/10", "b/2"]
    assert bucket.read("a")[0] == b"from a file"
    assert bucket.read_range("a", 5, 6, bucket.objects()["a"].version) == b"a"
    bucket.copy("a", "c")
    bucket.delete("a")
    bucket.delete("a")
    assert [*server.objects("bucket", "runs/a/")] == ["runs/a/b/10", "runs/a/b/2", "runs/a/b2", "runs/a/c"]
    bucket.download("c", tmp_path / "copy", bucket.objects()["c"].version)
    assert (tmp_path / "copy").read_bytes() == b"from a file"


def test_a_large_file_is_sent_in_parts(bucket, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "PART", 5 * 2**20)  # the least that S3 accepts
    (tmp_path / "file").write_bytes(content := bytes(range(256)) * 2**16)
    bucket.write("large", tmp_path / "file")
    bucket.download("large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content


def test_conditions_let_one_writer_through(bucket):
    first = bucket.create("lock", b"1")
    with pytest.raises(FileExistsError, match="somebody else has written it"):
        bucket.create("lock", b"2")
    second = bucket.replace("lock", b"2", first)
    with pytest.raises(FileExistsError):
        bucket.replace("lock", b"3", first)
    assert bucket.read("lock") == (b"2", second)
    bucket.delete("lock")
    with pytest.raises((FileExistsError, FileNotFoundError)):
        bucket.replace("lock", b"3", second)
    assert not bucket.objects()


def test_what_was_replaced_since_it_was_listed_is_not_downloaded(bucket, tmp_path):
    bucket.write("x", b"old")
    found = bucket.objects()["x"]
    bucket.write("x", b"new")
    with pytest.raises(FileExistsError):
        bucket.download("x", tmp_path / "x", found.version)
    assert not (tmp_path / "x").exists()


def test_what_is_larger_than_asked_for_is_not_read(bucket):
    bucket.write("x", b"12345")
    assert bucket.read("x", 5)[0] == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes") as caught:
        bucket.read("x", 4)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.parametrize("status", STATUSES)
def test_an_answer_is_told_without_the_servers_words(status, bucket, server, scheme, tmp_path, monkeypatch):
    kind, what = STATUSES[status]
    monkeypatch.setattr(module, "RETRIES", 1)
    bucket = Bucket(bucket.address, retry_seconds=0.2)
    for name, operation in operations(bucket, tmp_path / "x").items():
        with server.failing(status=status):
            if (name, status) == ("delete", 404):
                operation()
                continue
            with pytest.raises(OSError) as caught:
                operation()
        if name != "objects":  # whose exceptions are all of one kind
            assert isinstance(caught.value, kind) and caught.value.strerror == what, name
        assert caught.value.filename.startswith(f"{scheme}://bucket/runs/a")
        assert caught.value.__suppress_context__ and caught.value.__cause__ is None
        assert_no_secret(server, f"{caught.value!r} {caught.value}")
        assert not (tmp_path / "x").exists()


def test_a_server_that_refuses_connections_is_told(bucket, server, tmp_path):
    with server.failing(down=True):
        started = time.monotonic()
        with pytest.raises(OSError) as caught:
            bucket.read("x")
        assert caught.value.strerror == "the server cannot be reached"
        assert time.monotonic() - started < 3


def test_a_server_that_does_not_answer_is_told(server, scheme):
    bucket = Bucket(f"{scheme}://bucket/runs/a", request_seconds=0.2, retry_seconds=0.2)
    with server.failing(delay=5.0), pytest.raises(OSError) as caught:
        bucket.read("x")
    assert caught.value.strerror == "the server does not answer in time"


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 503}, {"status": 429}, {"down": True}])
def test_a_short_fault_is_not_noticed(fault, server, scheme, tmp_path):
    bucket = Bucket(f"{scheme}://bucket/runs/a")
    bucket.write("x", b"1")
    for name in ("objects", "write", "download"):
        with server.failing(**fault, times=2):
            operations(bucket, tmp_path / "y")[name]()


def test_a_write_whose_answer_was_lost_is_there(bucket, server):
    """A condition may then fail on what the same client has written: whoever sets one must expect it."""
    with server.failing(down=True, after=True, times=1):
        try:
            bucket.create("x", b"1")
        except OSError as error:
            assert error.filename.endswith("runs/a/x")
    assert bucket.read("x")[0] == b"1"


def test_names_with_unusual_letters_are_kept(server, scheme):
    for key in ("a b", "a@4", "é", "a+b=c", "%2e%2e/x", "a?b", "a#b"):
        bucket = Bucket(f"{scheme}://bucket/{key}")
        bucket.write(name := "n m~%#?é", b"1")
        assert [*bucket.objects()] == [name] and bucket.read(name)[0] == b"1"
        assert [*server.objects("bucket")] == [f"{key}/{name}"]
        bucket.delete(name)
        assert not server.objects("bucket")


@pytest.mark.parametrize("key", ["../x", "a/../../x", "a//b"])
def test_a_name_that_leads_elsewhere_is_told(key, bucket, server):
    server.put("bucket", f"runs/a/{key}", b"1")
    with pytest.raises(OSError, match=r"a name with an empty part, \. or \.\."):
        bucket.objects()


BAD = [
    "",
    "/",
    "bucket",
    "bucket/",
    "bucket/a/",
    "bucket//a",
    "bucket/a//b",
    "bucket/../x",
    "bucket/a/..",
    "bucket/./a",
]
BAD += ["Bad_Name!/x", "b/x", "user:pw@bucket/x", f"bucket/{'a' * 256}", "bucket/" + "a/" * 400 + "a"]


@pytest.mark.parametrize("rest", BAD)
def test_an_address_without_a_key_is_refused(rest, scheme):
    assert bucket_problem(f"{scheme}://{rest}")
    with pytest.raises(ConfigError, match=f"^{scheme}://"):
        Bucket(f"{scheme}://{rest}")


def test_a_missing_package_is_told(scheme, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"the package obstore is missing\. pip install 'spmd-lm\[(s3|gcs)\]'\.$"):
        Bucket(f"{scheme}://bucket/a")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Server returned non-2xx status code: 507 Insufficient Storage: <a>secret</a>",
         "the server answers 507 Insufficient Storage"),
        ("error sending request: kind: Timeout, secret", "the server does not answer in time"),
        ("retry_timeout: 30s, error sending request for url (http://secret)", "the server cannot be reached"),
        ("secret", "the request failed"),
    ],
)  # fmt: skip
def test_reasons_repeat_nothing_else(text, told):
    assert reason(text) == told
