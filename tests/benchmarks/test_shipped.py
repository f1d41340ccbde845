import sys


def test_configurations_that_name_their_hardware_come_by_size(benchmark_script, monkeypatch, capsys):
    shipped = benchmark_script("shipped")
    monkeypatch.setattr(sys, "argv", ["shipped.py", "ptd-p", "recomputation"])
    monkeypatch.setattr(shipped, "row", lambda path, topology, overrides, name: (name, True))
    assert shipped.main() == 0
    names = [line.partition(" on ")[0] for line in capsys.readouterr().out.splitlines() if " on " in line]
    assert len(names) == 14 and names[:10:9] == ["ptd-p/1.7b", "ptd-p/1t"]
    assert names[10:] == [f"recomputation/{size}" for size in ("22b", "175b", "530b", "1t")]
