"""Links, counts and examples of the pages hold."""

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_lm.config import checks, layout_checks
from spmd_lm.config.adapters import IA3, LoRA
from spmd_lm.config.load import dump, load
from spmd_lm.config.schema import RunConfig, variants
from spmd_lm.errors import ConfigError
from tests import processes
from tests.snippets import blocks

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


def test_keys_that_the_pages_name_exist():
    """Names like `model.safetensors` are those of files."""
    sections = {name: [s.model_fields for s in variants(name).values()] for name in RunConfig.model_fields}
    keys = {f"{name}.{field.alias or key}" for name, each in sections.items() for f in each for key, field in f.items()}
    for page in {*WRAPPED}:
        code = " ".join(re.findall(r"`([^`\n]+)`", page.read_text()))
        named = re.findall(rf"(?<![\w./{{])((?:{'|'.join(sections)})\.[a-z]\w+)(?![\w(])", code)
        assert not [name for name in named if name not in keys and not name.endswith((".log", ".safetensors"))], page


def test_make_help_names_every_target_that_is_for_people():
    told = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = " ".join(re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)).split()
    assert not [each for each in targets if not each.endswith("-latest") and f"make {each} " not in told]


@pytest.mark.parametrize("page", ["tour", "compilers"])
def test_the_files_that_a_page_names_are_there(page):
    text = (ROOT / f"docs/{page}.md").read_text()
    named = re.findall(r"`((?:spmd_lm/)?[a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", text)
    places = [ROOT, ROOT / "spmd_lm", *(path for path in (ROOT / "spmd_lm").iterdir() if path.is_dir())]
    assert len(named) > 20 and not [name for name in named if not any((place / name).exists() for place in places)]


@pytest.mark.parametrize(
    ("example", "recipe", "overrides", "context"),
    [
        (0, "bert/bert-base", [], 128),
        (1, "qwen/2.5-0.5b", ["run.dir=runs/qwen"], 2048),
        (2, "llama/3.1-8b", [], 2048),
    ],
)
def test_examples_of_fine_tuning_take_model_and_vocabulary_of_their_beginning(
    example, recipe, overrides, context, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    text = "".join((ROOT / "docs" / page).read_text() for page in ("finetuning.md", "adapters.md"))
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    Path("mine.yaml").write_text(examples[example])
    base = load(ROOT / f"configs/{recipe}.yaml", ["data.tokenizer=vocab.txt", *overrides])
    base.run.directory.mkdir(parents=True)
    (base.run.directory / "config.yaml").write_text(dump(base))
    mine = load("mine.yaml")
    assert mine.model == base.model.model_copy(update={"context": context}) and mine.data.tokenizer == "vocab.txt"


def make_reference():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs/make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_that_of_the_schema_and_the_parser():
    """Regenerate with: python docs/make_reference.py"""
    for name, page in make_reference().PAGES.items():
        assert (ROOT / "docs/reference" / name).read_text() == page(), name


def test_the_reference_has_the_comments_of_every_section():
    """Values are written as in YAML."""
    module = make_reference()
    sections = [section for name in RunConfig.model_fields for section in variants(name).values()]
    assert [section.__name__ for section in sections if section.__name__ not in module.COMMENTS] == []
    assert all(module.meaning(LoRA, key) for key in LoRA.model_fields if key != "kind")
    assert module.value_name(IA3.model_fields["targets"].default) == "`[key, value, down]`"


@pytest.mark.slow
def test_the_example_in_the_readme_plans_trains_and_samples(tmp_path):
    """The example runs unchanged; configs/debug.yaml trains for 20 steps."""
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
    """Calls of `plots` run unchanged, and return a figure that has axes."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/reports.md").read_text(), re.DOTALL)
    assert example.count("\nplots.") >= 5
    monkeypatch.chdir(ROOT)
    names = {"figures": []}
    exec(re.sub(r"\n(plots\..*\))", r"\nfigures.append(\1)", example), names)
    assert len(names["figures"]) == example.count("\nplots.")
    assert all(figure.axes for figure in names["figures"])


@pytest.mark.slow
def test_the_benchmark_runs():
    """The smallest size agrees on the losses; times are for people to judge."""
    line = [sys.executable, ROOT / "benchmarks/cpu_step.py", "tiny", "--rounds", "1", "--bar", "1000"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "hand-written" in done.stdout, done.stdout + done.stderr


def words(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def rows(page: str, header: str) -> list[list[str]]:
    """The cells of the table whose header begins like this."""
    table = (ROOT / page).read_text().partition(f"\n| {header} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table]


def test_the_readme_counts_the_steps_whose_bytes_are_those_of_theory():
    counts = [cells[-1].split(" of ") for cells in rows("docs/planning.md", "seed | drawn")]
    counts.append(re.findall(r"within 1% of theory's on (\d+) of (\d+) steps", words("docs/planning.md"))[0])
    near, drawn = (sum(map(int, column)) for column in zip(*counts, strict=True))
    sent = [tuple(map(float, cells[3:5])) for cells in rows("docs/parallelism/published.md", "configuration")]
    published = sum(abs(wire / theory - 1) < 0.01 for wire, theory in sent)
    assert drawn > 200 and len(sent) == 14
    told = words("README.md")
    assert f"within 1% on {near} of {drawn} steps" in told and f"on {published} of {len(sent)} published models" in told
    peaks = [cells[2].split(" of ") for cells in rows("docs/planning.md", "seed | drawn")]
    near, drawn = (sum(map(int, column)) for column in zip(*peaks, strict=True))
    assert f"within 10% of the compiler's peak on {near} of {drawn} steps" in told


@pytest.mark.slow
def test_the_readme_has_lines_of_an_audit_as_it_is_printed(tmp_path):
    block = next(each for each in blocks(ROOT / "README.md") if each.lines[0].startswith("$ spmd-lm audit"))
    _, *line = block.lines[0].split()
    command = [sys.executable, "-m", "spmd_lm", *line[1:]]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (printed,) = processes.wait(processes.start_command(command, tmp_path, PYTHONPATH=str(ROOT)))
    assert len(block.lines) == 9 and not set(block.lines[1:]) - set(map(str.rstrip, printed.splitlines()))


def test_the_readme_has_the_ratios_of_the_benchmarks():
    cells = rows("docs/benchmarks.md", "| jax 0.10.2, Python 3.11: CPU ms")
    ours = [row for row in cells if "spmd-lm" in row[0]]
    ratios = {
        scanned: [float(row[i].strip("*")) for row in ours if ("scanned" in row[0]) == scanned for i in (3, 6)]
        for scanned in (False, True)
    }
    spans = [f"{min(each):.2f} to {max(each):.2f} times" for each in ratios.values()]
    told = words("README.md")
    assert (
        f"{spans[0]} as long as a step written by hand, with layers unrolled, and {spans[1]} with the default" in told
    )
    both = [row for row in rows("docs/benchmarks.md", "size | step") if row[0] != "gpt2-1.2b"]
    of_pytorch = [float(cell) for row in both for cell in row[3:5]]
    span = f"{min(of_pytorch):.2f} to {max(of_pytorch):.2f} times"
    assert [row[0] for row in both] == ["gpt2-124m", "gpt2-355m"]
    assert f"GPT-2 124M and 355M take {span} as long as PyTorch's compiled ones" in told


def test_what_layouts_refuse_is_in_the_table(monkeypatch):
    """The rows are all refused, and the checks of layouts all refuse one."""
    refusing, caught = set(), set()

    def seen(check):
        @functools.wraps(check)
        def told(**sections):
            for problem in check(**sections):
                refusing.add(check)
                yield problem

        return told

    monkeypatch.setattr(checks, "CHECKS", [seen(check) for check in checks.CHECKS])
    for *_, example in rows("docs/parallelism/README.md", "refused"):
        refusing.clear()
        with pytest.raises(ConfigError):
            load(ROOT / "configs/debug.yaml", example.strip("`").split())
        assert refusing & {*layout_checks.CHECKS}, example
        caught |= refusing
    assert not {*layout_checks.CHECKS} - caught
