"""docs/reliability.md lists what is done to a run, and the tests that do it."""

import re

from tests.processes import ROOT


def test_every_case_has_its_tests():
    page = (ROOT / "docs/reliability.md").read_text()
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    rows = re.findall(r"^\| (\d+) \| .* \|(.*)\|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [*range(1, 40)]
    for number, cell in rows:
        names = re.findall(r"`(test_\w+)`", cell)
        assert names and not [name for name in names if f"def {name}(" not in tests], number
