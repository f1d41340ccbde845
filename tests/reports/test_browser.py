"""Reports in headless Chromium, as wide as a laptop's screen and as a telephone: make test-browser."""

import os

import pytest

from spmd_lm.reports.runs import make_page
from spmd_lm.sweeps.cells import Outcome
from tests.reports.run_files import HOSTILE, LIFE, PIPELINE, make_run, record
from tests.sweeps.cell_files import DONE, make_cell
from tests.sweeps.cell_files import make_page as make_sweep_page

CHROMIUM = "/usr/bin/chromium"
SMALLEST = 12  # CSS pixels, of any text on the screen

pytestmark = pytest.mark.browser

TEXTS = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.checkVisibility() || element.closest("style")) continue;
    const matrix = element.getScreenCTM ? element.getScreenCTM() : null;
    const scale = matrix ? Math.hypot(matrix.c, matrix.d) : 1;
    const box = element.getBoundingClientRect();
    const svg = element.closest("svg")?.getBoundingClientRect();
    const inside = !svg || (box.left >= svg.left - 1 && box.right <= svg.right + 1
      && box.top >= svg.top - 1 && box.bottom <= svg.bottom + 1);
    const size = scale * parseFloat(getComputedStyle(element).fontSize);
    found.push({text: node.textContent.trim().slice(0, 40), size: size, inside: inside});
  }
  return found;
}"""
"""Visible texts with their size on the screen, and if their figure holds them."""

OVERLAPS = """() => {
  const pairs = [];
  for (const svg of document.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")].filter(each => each.checkVisibility() && each.textContent.trim());
    const boxes = texts.map(each => each.getBoundingClientRect());
    for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
      const [a, b] = [boxes[i], boxes[j]];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 2 && down > 4) pairs.push([texts[i].textContent, texts[j].textContent]);
    }
  }
  return pairs;
}"""
"""Pairs of texts in one figure that lie over each other."""

METRICS = {"metric-loss", "metric-lr", "metric-grad-norm", "metric-tokens-per-second", "metric-mfu"}
COSTS = {"memory", "goodput"}


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    if not os.path.exists(CHROMIUM):
        pytest.skip(f"no {CHROMIUM}: make test-browser INSTALL=1")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def one_run(path):
    run = make_run(path / "a-run-with-a-rather-long-name", *PIPELINE, lives=[LIFE | {"peak_bytes": 2**21}] * 3)
    (run / "samples.txt").write_text("x" * 500 + HOSTILE)
    return make_page([run]), METRICS | COSTS | {"collectives", "layout-mesh", "layout-schedule"}


def several_runs(path):
    far = LIFE | {"devices": 1024, "platform": "tpu", "device_kind": "TPU v5p"}
    layout = "parallel.pipe=4", "parallel.microbatches=16", "parallel.model=8", "parallel.zero=3"
    runs = [make_run(path / f"a-run-with-a-rather-long-name-{i}", "optim.lr=1e-3") for i in range(7)]
    runs.append(make_run(path / "far", *layout, "train.batch=512", lives=[far], records=[record(1, **{HOSTILE: 3.0})]))
    return make_page(runs), METRICS | COSTS | {"run0-mesh", "run7-mesh", "run7-schedule", "run7-collectives", "other-0"}


def without_records(path):
    run = make_run(path / "failed", state="failed", exit_code=4, records=[], step=0, lives=None)
    return make_page([run]), {"goodput"}


def a_sweep(path):
    """A sweep of more cells than fit a legend, one failed with a long reason, on several numbers of devices."""
    name = "a-cell-with-a-rather-long-name_lr-0.000316228_zero-3-"
    cells = [make_cell(path, f"{name}{i}", 0.1, f"run.simulate_devices={2 ** (i % 4)}") for i in range(16)]
    outcomes = {cell.id: DONE for cell in cells} | {cells[3].id: Outcome("failed", 137, "x" * 300 + HOSTILE)}
    page, _ = make_sweep_page(cells, outcomes)
    speeds = {"median-tokens-per-second", "efficiency", "memory", "metric-loss", "metric-tokens-per-second"}
    return page, speeds


@pytest.mark.parametrize("make", [one_run, several_runs, without_records, a_sweep])
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)], ids=["laptop", "telephone"])
def test_a_report_is_legible_and_needs_nothing_else(browser, tmp_path, make, size):
    text, figures = make(tmp_path)
    file = tmp_path / "report.html"
    file.write_text(text)
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert not problems and [url for url in requests if not url.startswith("data:")] == [file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    texts = page.evaluate(TEXTS)
    assert len(texts) > 20
    assert not [each for each in texts if each["size"] < SMALLEST]
    assert not [each for each in texts if not each["inside"]]
    assert not page.evaluate(OVERLAPS)
    shown = {each.get_attribute("data-figure") for each in page.query_selector_all("figure")}
    assert figures <= shown and shown - figures <= {each for each in shown if each.startswith("run")}
    assert all(each.bounding_box()["width"] > 300 for each in page.query_selector_all("figure svg"))
    page.close()
