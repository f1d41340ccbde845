"""Event files, read back with tensorboardX's protobufs and checksums, which are TensorFlow's own definitions."""

import math
import struct
import sys

import pytest

from spmd_lm.runtime import tensorboard
from spmd_lm.runtime.metrics import MetricsLog
from spmd_lm.runtime.tensorboard import EventFile


@pytest.fixture(scope="module")
def tensorboardX():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)  # not to be imported: it takes seconds
        import tensorboardX

        return tensorboardX


@pytest.fixture
def read_events(tensorboardX):
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def checked(data, masked):
        crc = crc32c(data)
        assert masked == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        return data

    def read(path):
        data, events = path.read_bytes(), []
        while data:
            header, crc = data[:8], struct.unpack("<I", data[8:12])[0]
            (length,) = struct.unpack("<Q", checked(header, crc))
            body, (crc,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
            events.append(Event.FromString(checked(body, crc)))
            data = data[16 + length :]
        return events

    return read


def scalars(events):
    return {(event.step, value.tag): value.simple_value for event in events for value in event.summary.value}


def test_numbers_read_back(tmp_path, read_events):
    file = EventFile(tmp_path, first_step=1)
    file.write(1, {"loss": 0.1, "größe": -2.5, "skipped": True})
    file.write(2**40, {"tokens": 3 * 2**50, "perplexity": 1e300, "low": -1e300, "nan": math.nan})
    version, start, *events = read_events(next(tmp_path.iterdir()))  # whole before it is closed
    assert (version.file_version, start.session_log.status, start.step) == ("brain.Event:2", 1, 1)
    read = scalars(events)
    assert math.isnan(read.pop((2**40, "nan")))
    first = {(1, "loss"): pytest.approx(0.1, abs=1e-8), (1, "größe"): -2.5, (1, "skipped"): 1.0}
    step = 2**40
    assert read == first | {(step, "tokens"): 3 * 2**50, (step, "perplexity"): math.inf, (step, "low"): -math.inf}
    assert all(event.wall_time > 1.7e9 for event in events)
    file.close()


def test_crc32c_of_the_standard():
    """RFC 3720, B.4: 32 bytes of zeros, of ones, and 0 to 31."""
    for data, crc in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)):
        assert tensorboard.masked_crc32c(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_a_resumed_run_has_each_step_once(tmp_path, read_events):
    """TensorBoard drops, at a session's start, what it has of that step and later ones."""
    for resume_step, steps in ((0, range(1, 6)), (3, range(4, 8))):
        log = MetricsLog(tmp_path, resume_step)
        for step in steps:
            log.write({"step": step, "loss": step + resume_step / 10, "mfu": None, "bad": math.inf})
        log.close()
    read = {}
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        for event in read_events(path):
            if event.session_log.status == 1:
                read = {(step, tag): value for (step, tag), value in read.items() if step < event.step}
            new = scalars([event])
            assert not read.keys() & new.keys()
            read |= new
    expected = [1, 2, 3, 4.3, 5.3, 6.3, 7.3]
    assert read == {(step, "loss"): pytest.approx(value) for step, value in enumerate(expected, 1)}
