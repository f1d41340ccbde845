import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_lm.data.token_files.shard import BLOCK, ShardWriter, check_block, open_shard
from spmd_lm.errors import DataError
from tests.data.token_files.conftest import read_documents, write_shard

DOCUMENTS = [[1, 2, 3], [], [5] * 400]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(texts=st.lists(st.lists(st.integers(0, 70_000), max_size=20), max_size=6), eos=st.sampled_from([None, 0]))
@pytest.mark.parametrize("vocab", [65_536, 70_001])
def test_documents_come_back(tmp_path, texts, eos, vocab):
    texts = [[token % vocab for token in text] for text in texts]
    header = write_shard(tmp_path / "shard-00000", texts, vocab, eos)
    shard = open_shard(tmp_path / "shard-00000")
    end = [] if eos is None else [eos]
    assert [document.tolist() for document in read_documents(shard)] == [[*text, *end] for text in texts]
    assert shard.tokens.dtype == ("<u2" if vocab == 65_536 else "<u4") and shard.header == header
    assert header.documents == len(texts) and header.text_bytes == sum(map(len, texts))


def test_the_same_documents_make_the_same_bytes(tmp_path):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 1000, size).tolist() for size in (BLOCK, 3, BLOCK // 2, 17)]
    for name in "ab":
        write_shard(tmp_path / name / "shard-00000", texts)
    for suffix in (".bin", ".idx", ".json"):
        first, second = ((tmp_path / name / "shard-00000").with_suffix(suffix).read_bytes() for name in "ab")
        assert first == second
    assert len(json.loads(second)["block_crc32"]) == 4  # of 3 MiB and a little more


def test_nothing_has_its_name_before_the_end(tmp_path):
    writer = ShardWriter(tmp_path / "shard-00000", 1000, None, "bytes")
    writer.add(np.arange(10), 10)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.bin.tmp"]
    writer.abandon()
    assert not list(tmp_path.iterdir())


def test_ids_beyond_the_vocabulary_are_not_written(tmp_path):
    writer = ShardWriter(tmp_path / "shard-00000", 1000, None, "bytes")
    for ids, stray in (([3, 1000], 1000), ([-1, 3], -1)):
        with pytest.raises(DataError, match=f"token {stray} is not below the 1000 of the vocabulary"):
            writer.add(np.array(ids), 2)


def broken(path, suffix, change):
    file = path.with_suffix(suffix)
    file.write_bytes(bytes(change(bytearray(file.read_bytes()))))


def flip(data, at=-1):
    data[at] ^= 1
    return data


def edit(**values):
    return lambda data: json.dumps(json.loads(data) | values).encode()


@pytest.mark.parametrize(
    ("suffix", "change", "said"),
    [
        (".bin", lambda data: data[:-1], "it has 811 bytes instead of 812"),
        (".bin", lambda data: data + b"\0", "it has 813 bytes instead of 812"),
        (".bin", lambda data: b"", "it has 0 bytes instead of 812"),
        (".idx", lambda data: data[:-8], "it has 32 bytes instead of 40"),
        (".idx", flip, "its checksum is not that of what was written"),
        (".idx", lambda data: flip(data, 0), "its checksum is not"),
        (".json", lambda data: data[:-9], "not JSON"),
        (".json", lambda data: b"[]", "not a JSON object"),
        (".json", lambda data: b"{}", "not the header of a shard"),
        (".json", edit(version=2), "not the header of a shard"),
        (".json", edit(tokens=-1), "do not agree"),
        (".json", edit(dtype="u4"), "do not agree"),
        (".json", edit(dtype="f8"), "do not agree"),
        (".json", edit(tokens="9"), "do not agree"),
        (".json", edit(block_crc32=[]), "a checksum for each MiB"),
        (".json", edit(block_crc32=["0"]), "do not agree"),
        (".json", edit(block_crc32=5), "do not agree"),
    ],
)
def test_damage_is_told_with_its_file(tmp_path, suffix, change, said):
    write_shard(tmp_path / "shard-00000", DOCUMENTS)
    broken(tmp_path / "shard-00000", suffix, change)
    with pytest.raises(DataError, match=said) as error:
        open_shard(tmp_path / "shard-00000")
    assert f"shard-00000{suffix}: " in str(error.value) and "emove the data set, " in str(error.value)


def test_a_missing_file_is_told(tmp_path):
    for suffix in (".json", ".bin", ".idx"):
        write_shard(tmp_path / "shard-00000", DOCUMENTS)
        os.remove((tmp_path / "shard-00000").with_suffix(suffix))
        with pytest.raises(DataError, match=f"shard-00000{suffix}: cannot be read: No such file"):
            open_shard(tmp_path / "shard-00000")


def test_offsets_that_go_back_are_refused(tmp_path):
    """The checksum is right."""
    path = tmp_path / "shard-00000"
    header = write_shard(path, DOCUMENTS)
    for offsets in ([0, 500, 5, 406], [1, 4, 5, 406], [0, 4, 5, 405]):
        idx = b"SPMDLM01" + np.array(offsets, "<u8").tobytes()
        path.with_suffix(".idx").write_bytes(idx)
        changed = dataclasses.replace(header, idx_crc32=__import__("zlib").crc32(idx))
        path.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(changed)))
        with pytest.raises(DataError, match="its offsets do not divide the tokens"):
            open_shard(path)


def test_each_flipped_bit_of_the_tokens_is_found(tmp_path):
    path = tmp_path / "shard-00000"
    write_shard(path, [np.arange(1000).repeat(1100).tolist()])
    for at in np.random.default_rng(1).integers(0, 2_200_000, 20).tolist():
        broken(path, ".bin", lambda data, at=at: flip(data, at))
        shard = open_shard(path)
        with pytest.raises(DataError, match=r"shard-00000\.bin: damaged: the checksum of bytes"):
            check_block(shard, at // BLOCK)
        for block in {0, 1, 2} - {at // BLOCK}:
            check_block(shard, block)
        broken(path, ".bin", lambda data, at=at: flip(data, at))


def test_a_disk_that_is_full_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    writer = ShardWriter(tmp_path / "shard-00000", 1000, None, "bytes")
    writer.add(np.arange(10), 10)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        writer.finish()
    assert not shutil.rmtree(tmp_path / "absent", ignore_errors=True)
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".bin", ".idx", ".json")]
