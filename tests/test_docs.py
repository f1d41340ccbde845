"""What the pages point to is there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_lm.config.load import dump, load
from tests import processes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted(
    path for folder in ("docs", "benchmarks", "notebooks") for path in (ROOT / folder).rglob("*.md")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in t]
    assert not [target for target in targets if not (page.parent / target).exists()]


WRAPPED = [page for page in [*PAGES, ROOT / "Makefile"] if page.parent.name != "adr"]  # a decision is never rewritten


@pytest.mark.parametrize("page", WRAPPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_fit_where_they_are_read(page):
    """A table's row cannot be broken."""
    lines = page.read_text().splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


def test_make_help_names_every_target_that_is_for_people():
    told = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = " ".join(re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)).split()
    assert not [each for each in targets if not each.endswith("-latest") and f"make {each} " not in told]


def test_the_tour_passes_every_file_it_names():
    tour = (ROOT / "docs/tour.md").read_text()
    named = re.findall(r"`((?:spmd_lm/)?[a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", tour)
    places = [ROOT, ROOT / "spmd_lm", *(path for path in (ROOT / "spmd_lm").iterdir() if path.is_dir())]
    assert len(named) > 20 and not [name for name in named if not any((place / name).exists() for place in places)]


def test_the_example_of_fine_tuning_takes_model_and_vocabulary_of_its_beginning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/finetuning.md").read_text(), re.DOTALL)
    Path("mine.yaml").write_text(example)
    base = load(ROOT / "configs/bert/bert-base.yaml", ["data.tokenizer=vocab.txt"])
    base.run.directory.mkdir(parents=True)
    (base.run.directory / "config.yaml").write_text(dump(base))
    mine = load("mine.yaml")
    assert mine.model == base.model.model_copy(update={"context": 128}) and mine.data.tokenizer == "vocab.txt"


def test_the_reference_is_that_of_the_schema_and_the_parser():
    """If not: python docs/make_reference.py"""
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs/make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, page in module.PAGES.items():
        assert (ROOT / "docs/reference" / name).read_text() == page(), name


def test_the_example_in_the_readme_plans_trains_and_samples(tmp_path):
    """As it stands, in a process of its own; configs/debug.yaml trains for 20 steps."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(example.split("\n\n")[1].splitlines()) == 4  # and one that imports
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    process = processes.start_command([sys.executable, "-c", example], tmp_path, PYTHONPATH=str(ROOT))
    (text,) = processes.wait(process)
    assert "mesh    pipe 1 x replica 1 x data 4 x model 2 = 8 devices (cpu)" in text
    assert "step 20/20  loss" in text and re.search(r"\ndef main\((.|\n){30}", text)
    assert (tmp_path / "runs/python/checkpoints/20").is_dir()


@pytest.mark.slow
def test_the_pictures_of_docs_reports_are_drawn(monkeypatch):
    """Each call of `plots` as it stands, its value a figure that has axes."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/reports.md").read_text(), re.DOTALL)
    assert example.count("\nplots.") >= 5
    monkeypatch.chdir(ROOT)
    names = {"figures": []}
    exec(re.sub(r"\n(plots\..*\))", r"\nfigures.append(\1)", example), names)
    assert len(names["figures"]) == example.count("\nplots.")
    assert all(figure.axes for figure in names["figures"])


@pytest.mark.slow
def test_the_benchmark_runs():
    """Its smallest size, for its agreement on the losses; times are for people to judge."""
    line = [sys.executable, ROOT / "benchmarks/cpu_step.py", "tiny", "--rounds", "1", "--bar", "1000"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "hand-written" in done.stdout, done.stdout + done.stderr
