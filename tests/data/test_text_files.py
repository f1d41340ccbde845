import os
import sysconfig
from pathlib import Path

import pytest

from spmd_lm.data.text_files import read_documents, read_standard_library
from spmd_lm.errors import DataError


def write(root: Path, **files: str | bytes) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)


def names(*patterns: object) -> list[str]:
    return [document.name for document in read_documents([str(pattern) for pattern in patterns])]


def test_a_directory_gives_its_text_sorted_and_nothing_hidden(tmp_path):
    write(tmp_path, b_txt="b", a__z_md="z", a__c_py="c", image_png=b"\x89PNG", empty_txt="")
    write(tmp_path / ".git", note_txt="no")
    (tmp_path / ".hidden.txt").write_text("no")
    assert names(tmp_path) == ["a/c.py", "a/z.md", "b.txt"]


def test_names_do_not_depend_on_how_a_path_is_spelled(tmp_path, monkeypatch):
    write(tmp_path, a__one_txt="1", a__two_txt="2")
    monkeypatch.chdir(tmp_path)
    expected = ["one.txt", "two.txt"]
    for spelled in (["a"], [tmp_path / "a"], ["a/*.txt"], [f"{tmp_path}/a/**/*.txt"], ["a/one.txt", "a/two.txt"]):
        assert names(*spelled) == expected
    assert names("**/*.txt") == ["a/one.txt", "a/two.txt"]


def test_a_file_found_twice_is_read_once(tmp_path, monkeypatch):
    write(tmp_path, a_txt="a", b_txt="b")
    monkeypatch.chdir(tmp_path)
    assert names("b.txt", tmp_path, tmp_path / "*.txt") == ["b.txt", "a.txt"]


def test_a_file_of_any_suffix_may_be_named_even_with_brackets(tmp_path):
    (tmp_path / "x[1].tex").write_text("x")
    assert [document.text for document in read_documents([str(tmp_path / "x[1].tex")])] == [b"x"]


def fails(*patterns: object) -> str:
    with pytest.raises(DataError) as error:
        read_documents([str(pattern) for pattern in patterns])
    assert error.value.code == 4
    return str(error.value)


def test_missing_files(tmp_path):
    assert "no such file or directory" in (message := fails(tmp_path / "absent.txt"))
    assert f"data.path={tmp_path}/absent.txt" in message and str(Path.cwd()) in message
    assert "matches no file" in fails(tmp_path / "*.txt")
    assert "no path is given" in fails()


def test_a_directory_without_text_is_an_error_with_the_suffixes(tmp_path):
    write(tmp_path, image_png=b"\x89PNG")
    assert ".txt .md .rst .py" in fails(tmp_path)


def test_empty_files(tmp_path):
    write(tmp_path, a_txt="", b_txt="")
    assert "the file is empty" in fails(tmp_path / "a.txt")
    assert "all 2 files are empty" in fails(tmp_path)


def test_text_that_is_not_utf8_is_an_error_with_the_offset_and_a_remedy(tmp_path):
    write(tmp_path, latin_txt="caf\xe9 au lait".encode("latin1"), wide_txt="abc".encode("utf-16"))
    message = fails(tmp_path / "latin.txt")
    assert f"{tmp_path}/latin.txt: not UTF-8: byte 0xe9 at offset 3" in message and "iconv -f latin1" in message
    assert "iconv -f utf-16 -t" in fails(tmp_path / "wide.txt")


def test_a_separator_inside_a_text_is_an_error(tmp_path):
    write(tmp_path, a_txt=b"ab\0c")
    assert "NUL byte, which separates documents, at offset 2" in (message := fails(tmp_path))
    assert f"Drop it, for example by `tr -d '\\0' < {tmp_path}/a.txt > text.txt`" in message


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_byte_order_mark_is_recognized(tmp_path, encoding):
    write(tmp_path, a_txt="The café opens at ten.".encode(encoding))
    assert f"iconv -f {encoding} -t utf-8" in fails(tmp_path)


@pytest.mark.parametrize("binary", [bytes(range(256)), b"\x89PNG\r\n\x1a\n\x01", b"\x1f\x8b\x08 zipped"])
def test_a_binary_file_gets_no_advice_to_re_encode_it(tmp_path, binary):
    write(tmp_path, a_txt=binary)
    message = fails(tmp_path)
    assert message.endswith(". It is a binary file: leave it out of data.path.") and "iconv" not in message


@pytest.mark.parametrize("pattern", ["~nouser/x", "~nouser/*.txt"])
def test_a_missing_home_directory(pattern):
    assert fails(pattern) == f"data.path={pattern}: there is no such home directory. Write the path in full."


def test_a_file_that_is_not_regular(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in fails(tmp_path / "pipe")


def test_messages_name_the_given_key(tmp_path):
    """Other keys of the configuration find their files in the same way, by their own suffixes."""
    write(tmp_path, a_txt="a", b_json="{}", c_json=b"abcdef\0", d_json=b"\xff")
    with pytest.raises(DataError, match=r"^data\.validation_path: no path is given"):
        read_documents([], "data.validation_path")
    for name, message in {
        "": r"^data\.validation_path=.*: no file in this directory ends in \.tsv \.csv\. Name other kinds of files",
        "absent": r"^data\.validation_path=.*/absent: no such file",
        "*.tsv": r"^data\.validation_path=.*/\*\.tsv: matches no file",
        "c.json": r"c\.json: not text: .*or leave the file out of data\.validation_path\.$",
        "d.json": r"d\.json: not UTF-8: .*or leave it out of data\.validation_path\.$",
    }.items():
        with pytest.raises(DataError, match=message):
            read_documents([str(tmp_path / name)], "data.validation_path", (".tsv", ".csv"))
    with pytest.raises(DataError, match=r"^data\.validation_path=~nouser/x: there is no such home"):
        read_documents(["~nouser/x"], "data.validation_path")
    assert [each.name for each in read_documents([str(tmp_path)], "data.validation_path", (".txt",))] == ["a.txt"]


def test_an_unreadable_file(tmp_path, monkeypatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    write(tmp_path, a_txt="a")
    monkeypatch.setattr(Path, "read_bytes", refuse)  # root reads what chmod forbids
    assert f"{tmp_path}/a.txt: cannot be read: Permission denied" in fails(tmp_path)


def test_an_unreadable_directory(tmp_path, monkeypatch):
    write(tmp_path, a__b_txt="b")
    listed = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert f"{tmp_path}/a: cannot be read: Permission denied" in fails(tmp_path)


def test_the_standard_library_is_sorted_and_without_its_tests():
    found = [document.name for document in read_standard_library()]
    assert found == sorted(found) and {"os.py", "json/decoder.py"} <= set(found)
    parts = {part for name in found for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "encodings"}


def test_the_standard_library_is_without_files_not_utf8_or_of_one_machine(tmp_path, monkeypatch):
    write(tmp_path, a_py="a", koi8_py=b"\xf0", nul_py=b"\0")
    (tmp_path / "_sysconfigdata__linux.py").write_text("flags")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert [document.name for document in read_standard_library()] == ["a.py"]


def test_a_python_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match=r"installed without its sources\. Use data\.source=text"):
        read_standard_library()
