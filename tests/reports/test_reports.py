"""A report needs nothing but itself, shows what the run's files say, and stands whatever state they are in."""

import json
import math
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_lm import cli
from spmd_lm.errors import CheckpointError, ConfigError, UserError
from spmd_lm.reports.page import Html, Page, cards, details, facts, figure, notice, preformatted, table
from spmd_lm.reports.runs import make_page, write_report
from spmd_lm.runtime.directories import lock_directory
from tests.reports.run_files import HOSTILE, LIFE, PIPELINE, make_run, record

VOID = {"meta", "link", "br", "img", "path", "use", "rect"}


class Parsed(HTMLParser):
    """The elements of a page: figures by name, ids, texts, and every attribute that could load something."""

    def __init__(self, page):
        super().__init__()
        self.figures, self.ids, self.texts, self.tags, self.loaded, self.labels, self.open = (
            [],
            [],
            [],
            set(),
            [],
            [],
            [],
        )
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.add(tag)
        self.open += [] if tag in VOID else [tag]
        self.figures += [found["data-figure"]] if "data-figure" in found else []
        self.labels += [found.get("aria-label")] if tag == "svg" else []
        self.ids += [found["id"]] if "id" in found else []
        self.loaded += [v for k, v in found.items() if k in ("src", "href", "srcset", "action", "data")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts += [data.strip()] if data.strip() else []


def parse(page) -> Parsed:
    parsed = Parsed(page)
    assert not parsed.open and len(parsed.ids) == len(set(parsed.ids)) and all(parsed.labels)
    assert "http" not in page and "script" not in parsed.tags and "@import" not in page
    assert all(each.startswith("#") or each == "data:," for each in parsed.loaded)
    assert "viewport" in page and '<html lang="en">' in page and "title" in parsed.tags
    page.encode()
    return parsed


METRICS = {"metric-loss", "metric-lr", "metric-grad-norm", "metric-tokens-per-second", "metric-mfu"}
COSTS = {"memory", "goodput", "collectives", "layout-mesh"}


def test_a_finished_run(tmp_path):
    run = make_run(tmp_path / "mine", *PIPELINE, lives=[LIFE | {"peak_bytes": 3 * 2**20}])
    (run / "samples.txt").write_text("def main(): pass")
    parsed = parse(make_page([run]))
    assert set(parsed.figures) == METRICS | COSTS | {"layout-schedule"}
    found = parsed.texts
    assert {
        "mine",
        "done",
        "20 of 20",
        "30k",
        "40.0%",
        "8 cpu",
        "pipe 2 × data 2 × model 2",
        "def main(): pass",
    } <= set(found)
    assert "all-reduce over model" in found and "1–20" in found  # from theory, and from status.json
    assert "Planned. Most that one device used: 3.0 MiB." in found
    assert any("run:\n" in text and "steps: 20" in text for text in found)


def test_no_device_is_started(tmp_path):
    """The run's 64 TPUs are not here; and a GPU that is here would be kept from others."""
    life = LIFE | {"devices": 64, "platform": "tpu", "device_kind": "TPU v5p"}
    make_run(tmp_path / "far", "train.batch=64", lives=[life])
    code = (
        "import sys; from spmd_lm import cli; code = cli.main(['report', sys.argv[1]]); "
        "from jax._src import xla_bridge; assert not xla_bridge._backends; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "far"], check=True, capture_output=True, text=True)
    parsed = parse((tmp_path / "far/report.html").read_text())
    assert {"64 tpu", "64 x TPU v5p", "data 64"} <= set(parsed.texts)


def test_a_killed_run_is_not_said_to_run(tmp_path):
    """A process that is killed leaves its lock file, unlocked."""
    life = LIFE | {"exit_code": None}
    run = make_run(tmp_path / "mine", state="running", step=3, exit_code=None, lives=[life])
    with lock_directory(run, print, True):
        left = (run / ".lock").read_text()
        assert "running" in parse(make_page([run])).texts
    (run / ".lock").write_text(re.sub(r" on \S+", " on another-host", left))
    assert "running" in parse(make_page([run])).texts
    (run / ".lock").write_text(left)
    texts = parse(make_page([run])).texts
    assert "killed" in texts and any(text.startswith("killed after 20") for text in texts) and "running" not in texts


@pytest.mark.parametrize(
    "overrides, changes, expected",
    [
        ((), {"state": "running", "step": 3, "exit_code": None, "lives": [LIFE | {"exit_code": None}]}, "running"),
        ((), {"state": "preempted", "step": 3, "exit_code": 3, "lives": [LIFE | {"exit_code": 3}]}, "preempted (3)"),
        ((), {"state": "failed", "step": 0, "exit_code": 4, "records": []}, "failed: data (4)"),
        ((), {"state": "running", "step": 0, "records": [], "exit_code": None}, "0 of 20"),
        ((), {"records": [record(1, loss=None, mfu=None), record(2, loss=None, mfu=None)]}, "done"),
        ((), {"records": [{"step": 5, "eval_loss": 2.0, "eval_mnli_accuracy": 0.5}]}, "mnli_accuracy"),
        ((), {"records": [record(1, **{HOSTILE: 1.0, "eval_\ud800": 2.0})]}, "done"),
        (("model.kind=bert", "model.vocab=260", "objective.kind=masked_lm"), {}, "done"),
        (("precision.compute=float16", "precision.loss_scale=dynamic"), {}, "done"),
        (("parallel.zero=3", "parallel.replica=2"), {}, "replica 2 × data 4"),
    ],
    ids=["running", "preempted", "failed", "no metrics", "nan", "evaluations", "hostile", "bert", "float16", "hybrid"],
)
def test_a_run_in_any_state(tmp_path, overrides, changes, expected):
    run = make_run(tmp_path / "mine", *overrides, **changes)
    parsed = parse(make_page([run]))
    assert any(expected in text for text in parsed.texts)
    assert set(parsed.figures) >= COSTS
    if changes.get("records", True) == []:
        assert "No metrics yet: the first are written after train.log_every steps." in parsed.texts


def test_a_run_of_an_older_version_says_what_it_does_not_know(tmp_path):
    parsed = parse(make_page([make_run(tmp_path / "old", lives=None)]))
    assert any("an older version wrote its status.json" in text for text in parsed.texts)
    assert any("did not record its starts" in text for text in parsed.texts)
    assert set(parsed.figures) == METRICS | {"goodput"}
    parsed = parse(make_page([make_run(tmp_path / "simulated", "run.simulate_devices=8", lives=None)]))
    assert set(parsed.figures) == METRICS | COSTS  # its config says it


def test_a_run_whose_config_no_longer_fits(tmp_path):
    run = make_run(tmp_path / "mine")
    (run / "config.yaml").write_text("model: {layers: many}\n")
    parsed = parse(make_page([run]))
    assert any("No layout, because the configuration is not valid here" in text for text in parsed.texts)
    (run / "config.yaml").unlink()
    parse(make_page([run]))


def test_a_run_that_was_only_imported(tmp_path):
    run = make_run(tmp_path / "mine")
    (run / "status.json").unlink()
    (run / "metrics.jsonl").unlink()
    assert "not started" in parse(make_page([run])).texts


def test_hostile_samples_and_directories(tmp_path):
    run = make_run(tmp_path / "a <b> $x$ & c" / "mine")
    (run / "samples.txt").write_bytes(HOSTILE.encode() + b"\xff\xfe" + b"x" * 50_000)
    page = make_page([run, make_run(tmp_path / "other" / "mine")])  # two of one name: known by their directories
    parsed = parse(page)
    assert "\x00" not in page and "\x1b" not in page
    assert any(
        text.startswith("<script>alert('$x_1$')</script> & \"q\"") and len(text) < 21_000 for text in parsed.texts
    )
    assert str(run) in parsed.texts


def test_several_runs_are_laid_over_each_other(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", *PIPELINE), make_run(tmp_path / "c", lives=None)]
    parsed = parse(make_page([*runs, runs[0]]))
    assert parsed.figures.count("metric-loss") == 1 and "3 runs" in parsed.texts
    layouts = {"run0-mesh", "run1-mesh", "run1-schedule", "run1-collectives"}
    assert METRICS | {"memory", "goodput"} | layouts <= set(parsed.figures)
    assert "parallel.microbatches" in parsed.texts and "train.steps" not in parsed.texts  # what differs


def test_a_long_run_makes_a_small_page(tmp_path):
    run = make_run(tmp_path / "long", records=[record(i) for i in range(1, 100_001)])
    page = make_page([run])
    assert len(page) < 700_000
    parse(page)


def test_several_starts(tmp_path):
    killed = LIFE | {"exit_code": None, "last_step": 7, "devices": 4}
    parsed = parse(make_page([make_run(tmp_path / "mine", restarts=5, lives=[killed, LIFE | {"first_step": 8}])]))
    assert {"1–7", "8–20", "killed", "done (0)", "4 x cpu", "4 earlier starts not recorded."} <= set(parsed.texts)


# ---- the command


def test_the_command_writes_one_file(tmp_path, capsys):
    run = make_run(tmp_path / "mine")
    before = {path.name for path in run.iterdir()}
    assert cli.main(["report", str(run)]) == 0
    assert {path.name for path in run.iterdir()} - before == {"report.html"}
    assert capsys.readouterr().out == f"{run}/report.html: the report on 1 run\n"
    assert cli.main(["report", str(run), f"{run}/", "--out", str(tmp_path / "b.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/b.html: the report on 1 run\n"
    assert cli.main(["report", str(run), str(run), "--out", str(tmp_path / "b.html"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "b.html")}
    parse((tmp_path / "b.html").read_text())


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["EMPTY"], "no config.yaml in this directory, so it is not a run. Give"),
        (["MISSING"], "no such directory, so it is not a run. Give"),
        (["RUN", "EMPTY"], "no config.yaml in this directory"),
        ([], "no RUN given"),
        (["RUN", "--out", "DIR/missing/x.html"], "cannot be written"),
        (["RUN", "--out", "EMPTY"], "Give a file that ends in .html"),
        (["RUN", "--out", "DIR/RUN/metrics.jsonl"], "Give a file that ends in .html"),
        (["RUN", "train.steps=3"], "train.steps=3: no such directory"),
    ],
)
def test_what_cannot_be_reported_is_said_and_nothing_is_written(tmp_path, capsys, arguments, problem):
    (tmp_path / "empty").mkdir()
    names = {"EMPTY": tmp_path / "empty", "MISSING": tmp_path / "missing", "RUN": make_run(tmp_path / "mine")}
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["report", *(str(names.get(a, a.replace("DIR", str(tmp_path)))) for a in arguments)]) == 2
    assert problem in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    run = make_run(tmp_path / "mine")
    (run / "report.html").write_text("old")

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spmd_lm.files.os.fsync", fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_report([run], None)
    assert (run / "report.html").read_text() == "old" and not (run / "report.html.tmp").exists()


def test_a_read_only_file_system_is_told(tmp_path, monkeypatch):
    run = make_run(tmp_path / "mine")

    def fail(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("spmd_lm.reports.runs.write_atomically", fail)
    monkeypatch.setattr("pathlib.Path.unlink", fail)
    with pytest.raises(ConfigError, match=r"report.html: cannot be written: Read-only file system. Give another file"):
        write_report([run], None)


def test_damaged_records_are_an_error(tmp_path):
    run = make_run(tmp_path / "mine")
    (run / "metrics.jsonl").write_text("not json\n")
    with pytest.raises(CheckpointError, match="line 1"):
        write_report([run], None)
    assert not (run / "report.html").exists()


# ---- the page


def test_what_is_not_markup_is_escaped():
    page = Page(HOSTILE, HOSTILE)
    blocks = [HOSTILE, table([HOSTILE], [[HOSTILE]]), details(HOSTILE, HOSTILE), facts({HOSTILE: HOSTILE})]
    page.section(HOSTILE, *blocks, preformatted(HOSTILE), notice(HOSTILE), cards(), "", Html())
    parsed = parse(page.html())
    assert "script" not in parsed.tags
    assert sum("alert('$x_1$')" in text for text in parsed.texts) == 13


def test_sections_without_content_are_left_out():
    page = Page("title")
    page.section("nothing", "", cards(), details("x"))
    assert "nothing" not in page.html()


def test_columns_of_numbers_are_aligned():
    rows = str(table(["name", "loss"], [["a", 1.5], ["b", "–"]]))
    assert "<td>a</td><td class=number>1.5</td>" in rows and "<th>name</th><th class=number>loss</th>" in rows


def test_wide_figures_scroll_in_their_own_box(tmp_path):
    from spmd_lm import plots

    narrow, wide = figure(plots.curves([]), "a"), figure(plots.schedule("1f1b", 8, 16), "b", "a <caption>")
    assert 'class="card"' in narrow and 'class="card wide"' in wide
    assert 'aria-label="a &lt;caption&gt;"' in wide and "min-width:340px" in narrow


@pytest.mark.parametrize("name", ["samples.txt", "config.yaml", "metrics.jsonl", "status.json"])
@pytest.mark.parametrize("target", ["absolute", "relative", "of a link", "to nothing"])
def test_a_report_follows_no_link_out_of_its_run(name, target, tmp_path):
    """The page is made to be sent to others."""
    run, secret = make_run(tmp_path / "run"), tmp_path / "secret"
    secret.write_text((run / name).read_text() if (run / name).exists() else "a secret")
    (run / name).unlink(missing_ok=True)
    (tmp_path / "between").symlink_to("secret")
    targets = {"absolute": secret, "relative": "../secret", "of a link": "../between", "to nothing": "nowhere"}
    (run / name).symlink_to(targets[target])
    with pytest.raises(ConfigError, match=rf"run/{name}: is a link.* Put the file itself there\."):
        write_report([run], None)
    assert not (run / "report.html").exists()


def test_a_run_may_be_named_by_a_link(tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    assert write_report([tmp_path / "latest"], None).exists()


@pytest.mark.parametrize("base", ["secret", "../secret", "/etc/hostname", "[secret]"])
def test_nothing_of_a_base_comes_into_a_report(base, tmp_path):
    run = make_run(tmp_path / "run")
    for path in (run / "secret", tmp_path / "secret"):
        path.write_text("hunter2: 3\nmodel: {layers: hunter3}\n")
    (run / "config.yaml").write_text(f"base: {base}\n")
    page = make_page([run])
    assert "hunter" not in page and "has a base, as that of no run has" in page


VALUES = [
    0,
    -1,
    2**31,
    2**63,
    10**400,
    1e308,
    -1e308,
    5e-324,
    math.inf,
    math.nan,
    True,
    None,
    "",
    "\ud800",
    [],
    {"a": 1},
]
json_values = st.sampled_from(VALUES) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
changes = st.dictionaries(st.sampled_from([*record(1), "eval_loss", "reason", "id", "x y"]), json_values, max_size=3)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(changes, changes, st.dictionaries(st.sampled_from([*LIFE]), json_values, max_size=2), json_values, json_values)
def test_any_value_in_a_run_s_files_makes_a_page_or_a_sentence(first, last, life, seconds, restarts):
    with tempfile.TemporaryDirectory() as directory:
        lives, records = [LIFE | life], [record(1) | first, record(2), record(3) | last]
        run = make_run(Path(directory, "run"), lives=lives, records=records)
        about = json.loads((run / "status.json").read_text())
        about |= {"restarts": restarts, "goodput": about["goodput"] | {"step": seconds, "sleep": 1.0}}
        (run / "status.json").write_text(json.dumps(about))
        try:
            make_page([run]).encode()
        except UserError as error:
            assert len(str(error)) < 2000 and "\n" not in str(error)


@pytest.mark.parametrize("platform", ["", "metal", "TPU", "x" * 999, "<b>"])
def test_layouts_of_unknown_devices_are_left_out(platform, tmp_path):
    page = make_page([make_run(tmp_path / "run", lives=[LIFE | {"platform": platform}])])
    assert "No layout, because it ran on devices of another kind" in page and "Training" in page


@pytest.mark.parametrize("bucket", ["sleep", "", "\ud800", "<b>", "Step"])
def test_seconds_of_unknown_buckets_are_other_time(bucket, tmp_path):
    page = make_page([make_run(tmp_path / "run", goodput={bucket: 60.0, "step": 20.0})])
    assert "time spent" in page and "25% in steps" in page


@pytest.mark.parametrize("value", [10**400, -(10**400), 2**63, -(2**63)])
def test_numbers_that_no_run_has_are_damage(value, tmp_path):
    run = make_run(tmp_path / "run", records=[record(1, loss=value)])
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: line 1 is not a record \(no run has a loss of"):
        make_page([run])


@pytest.mark.parametrize("value", [math.inf, 1e308, math.nan, "text", [1], None])
def test_what_is_no_metric_is_a_gap(value, tmp_path):
    run = make_run(tmp_path / "run", records=[record(1), record(2, loss=value, mfu=value, tokens_per_second=value)])
    assert "loss</dt><dd>5.0000" in make_page([run])


@pytest.mark.parametrize("devices", [2**18, 2**24, 2**30])
def test_more_devices_than_a_page_shows_are_told(devices, tmp_path):
    page = make_page([make_run(tmp_path / "run", lives=[LIFE | {"devices": devices}])])
    assert f"{devices:,} devices are more than a page shows" in page
