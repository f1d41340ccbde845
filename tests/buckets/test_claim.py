"""The claim of one writer: of two, one is refused, and none is left out for longer than a dead one's lease."""

import json
import threading
import time

import pytest

from spmd_lm.buckets.bucket import Bucket
from spmd_lm.buckets.claim import LOCK, Claim, Lock, parse_lock
from spmd_lm.errors import ConfigError, OutputError

RENEWAL, EXPIRY = 0.05, 0.25  # seconds
KEY = f"a/{LOCK}"


class Claims:
    """Claims of one address, released after the test."""

    def __init__(self, address: str, renewal: float = RENEWAL, expiry: float = EXPIRY):
        self.address, self.all, self.lines = address, [], []
        self.bucket = Bucket(self.address, request_seconds=1.0, retry_seconds=0.2)
        self.how = {"renewal": renewal, "expiry": expiry}

    def __call__(self, token: str, **how: float) -> Claim:
        self.all.append(claim := Claim(self.bucket, token, f"process {token}", self.lines.append, **self.how | how))
        return claim

    def held(self, token: str, **how) -> Claim:
        (claim := self(token, **how)).acquire()
        return claim


@pytest.fixture
def claims(server, scheme):
    claims = Claims(f"{scheme}://bucket/a")
    yield claims
    server.faults.clear()
    for claim in claims.all:
        claim.abandon()
    for claim in claims.all:
        if claim._thread.ident is not None:
            claim._thread.join()


def lock(server) -> Lock:
    return parse_lock(server.objects("bucket")[KEY])


def kill(claim: Claim) -> None:
    claim.abandon()
    claim._thread.join()


def test_a_second_writer_is_refused_while_the_first_renews(claims, server):
    claims.held("one")
    before = server.objects("bucket")[KEY]
    with pytest.raises(ConfigError, match=r"/a: process one is writing there\. Wait for it, stop it, or choose"):
        claims("two").acquire()
    assert server.objects("bucket")[KEY] != before
    assert claims.lines == [f"{claims.address}: claimed by process one: seeing whether it is still there."]
    assert lock(server).token == "one"


def test_a_released_claim_is_taken_at_once_and_names_the_latest_copy(claims, server):
    first = claims("one")
    assert first.acquire() == ""
    first.release()
    assert lock(server).latest == "" and lock(server).state == "released"  # it has not fetched
    second = claims("two")
    assert second.acquire() == ""
    second.become_latest()
    second.release()
    third = claims("three", expiry=60.0)
    assert third.acquire() == "two"
    assert lock(server).latest == "two"  # until it has fetched
    third.become_latest()
    assert lock(server)[:3] == ("three", "process three", "held") and lock(server).latest == "three"
    assert not claims.lines


def test_a_dead_holders_claim_expires(claims, server):
    kill(claims.held("one"))
    started = time.monotonic()
    claims.held("two")
    assert EXPIRY <= time.monotonic() - started < EXPIRY + 1.0
    assert claims.lines[-1] == f"{claims.address}: process one is gone: its claim is taken over."
    assert lock(server).token == "two"


def test_the_same_copys_claim_is_taken_over_at_once(claims, server):
    kill(claims.held("one", renewal=60.0, expiry=60.0))
    started = time.monotonic()
    claims.held("one", expiry=60.0)
    assert time.monotonic() - started < 1.0 and not claims.lines


def test_of_two_copies_with_one_token_one_loses(claims):
    """As of a cache that was copied to another machine."""
    first = claims.held("one", renewal=60.0)
    second = claims.held("one", renewal=60.0)
    second.confirm()
    with pytest.raises(OutputError, match="process one took it over"):
        first.confirm()
    second.confirm()


def test_of_writers_that_start_at_once_one_is_let_through(server, scheme):
    """In any of 2 * 25 rounds: on an address nobody used, one that was released, and one of a dead process."""
    for number in range(25):
        claims = Claims(f"{scheme}://bucket/{number}", renewal=0.02, expiry=0.1)
        if number % 3 == 1:
            claims.held("zero").release()
        if number % 3 == 2:
            kill(claims.held("zero"))
        start, held, refused = threading.Barrier(2), [], []

        def acquire(claim, start=start, held=held, refused=refused):
            start.wait()
            try:
                claim.acquire()
            except ConfigError:
                refused.append(claim)
            else:
                held.append(claim)

        threads = [threading.Thread(target=acquire, args=[claims(token)]) for token in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(held), len(refused)) == (1, 1), number
        held[0].confirm()
        held[0].release()


def test_a_holder_that_was_out_for_too_long_finds_its_claim_taken(claims, server):
    first = claims.held("one", renewal=0.6)
    claims.held("two", renewal=0.02)
    first.require()  # it does not know yet
    with pytest.raises(OutputError) as caught:
        first.confirm()
    what = "process two took it over, after this process could not renew its claim for 0.25 s"
    assert str(caught.value) == f"{claims.address}: {what}. Nothing more is written there."
    with pytest.raises(OutputError):
        first.require()
    first.release()
    assert lock(server).token == "two" and lock(server).state == "held"


def test_the_thread_notices_a_lost_claim(claims):
    first = claims.held("one", renewal=0.5)
    claims.held("two", renewal=0.02)
    first._thread.join()
    with pytest.raises(OutputError):
        first.require()


def test_a_removed_lock_ends_the_claim(claims, server):
    first = claims.held("one", renewal=60.0)
    server.delete("bucket", KEY)
    with pytest.raises(OutputError, match=r"somebody, who removed \.lock, took it over"):
        first.confirm()
    assert KEY not in server.objects("bucket")


@pytest.mark.parametrize("when", ["acquired", "renewed", "released"])
@pytest.mark.parametrize("fault", [{"down": True}, {"status": 500}])
def test_a_lost_answer_loses_no_claim(when, fault, claims, server):
    def is_write(method, path):
        return method in ("PUT", "POST") and LOCK in path

    lost = {"after": True, "times": 3, "where": is_write} | fault
    claim = claims("one", renewal=60.0)
    if when == "acquired":
        with server.failing(**lost):
            for _ in range(4):
                try:
                    claim.acquire()
                    break
                except OSError:  # told; the same command tries again
                    claim = claims("one", renewal=60.0)
    else:
        claim.acquire()
    if when == "renewed":
        with server.failing(**lost):
            for _ in range(3):
                try:
                    claim.confirm()
                except OSError as error:
                    assert not isinstance(error, OutputError)
    claim.confirm()
    claim.require()
    if when == "released":
        with server.failing(**lost):
            claim.release()
        assert lock(server).state == "released"
    else:
        claim.release()
        assert lock(server).state == "released"


def test_a_claim_outlives_a_server_that_is_down(claims, server):
    claim = claims.held("one", expiry=60.0)
    with server.failing(down=True):
        with pytest.raises(OSError):
            claim.confirm()
        claim.require()
    claim.confirm()
    assert claim._thread.is_alive()


def test_release_returns_while_the_server_is_down(claims, server):
    claim = claims.held("one")
    with server.failing(down=True):
        claim.release()
    assert lock(server).state == "held"


BAD = [b"", b"{", b"[]", b"null", b"\xff", b'{"token": 1}', b"[" * 5000, b"1"]


@pytest.mark.parametrize("content", BAD)
def test_a_lock_that_nobody_can_read_expires(content, claims, server):
    server.put("bucket", KEY, content)
    claims.held("one")
    assert claims.lines[-1] == f"{claims.address}: somebody is gone: its claim is taken over."


def test_a_huge_lock_is_refused(claims, server):
    server.put("bucket", KEY, json.dumps({"holder": "a" * 20_000}).encode())
    with pytest.raises(OSError, match="more than 10,000 bytes"):
        claims("one").acquire()
