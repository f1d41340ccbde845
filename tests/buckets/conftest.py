import pytest

from tests.buckets.server import BucketServer


@pytest.fixture(params=["s3", "gs"])
def scheme(request):
    return request.param


@pytest.fixture(scope="module")
def one_server():
    with BucketServer() as server:
        yield server


@pytest.fixture
def server(one_server, scheme, monkeypatch, tmp_path):
    """A server with an empty bucket named `bucket`, which this process finds, and a cache of this test's."""
    one_server.reset()
    one_server.create_bucket("bucket")
    for name, value in one_server.environment(scheme).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield one_server
    one_server.faults.clear()
