"""`spmd-lm report`: the page of one run, or of several laid over each other, from their files.

Starts no devices: status.json records the devices of each attempt, for which the layout is planned."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import spmd_lm
from spmd_lm import plots
from spmd_lm.config import syntax
from spmd_lm.config.load import CONFIG_FILE, load_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.memory import COMPILERS
from spmd_lm.errors import ConfigError, Exit, LayoutError
from spmd_lm.files import read_bytes, write_atomically
from spmd_lm.planning.plan_report import describe
from spmd_lm.reports.page import (
    Content,
    Page,
    card,
    cards,
    details,
    facts,
    figure,
    join,
    notice,
    preformatted,
    table,
)
from spmd_lm.resolve import abstract_plan
from spmd_lm.runtime.directories import was_killed
from spmd_lm.runtime.formatting import format_bytes, format_duration, format_quantity, pluralize, to_json
from spmd_lm.runtime.metrics import Attempt, Record, Status, is_number, read_records

METRICS = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "accuracy", "loss_scale")  # drawn before all others

NOT_DRAWN = ("step", "tokens", "seconds", "perplexity", "skipped", "skipped_steps", "expert_load")
READ_FILES = ("status.json", CONFIG_FILE, "metrics.jsonl", "samples.txt")
MOST_SHOWN = 2**17
MOST_OTHERS = 12
MOST_CHARACTERS = 20_000  # shown of samples.txt
MOST_BYTES = 2**20  # read of it, and of config.yaml
UNKNOWN = "–"


@dataclass
class RunFiles:
    """The files of a run in any state."""

    directory: Path
    name: str
    config: RunConfig | None = None
    config_text: str = ""
    status: Status | None = None  # None before the first attempt
    written: datetime | None = None  # when status.json was
    killed: bool = False  # status says running, but the process is gone
    records: list[Record] = field(default_factory=list)
    generated: str = ""  # samples.txt
    plan: Mapping[str, Any] | None = None
    collectives: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # what the page cannot show, and why

    @property
    def attempts(self) -> list[Attempt]:
        return self.status.attempts if self.status else []

    def last(self, key: str) -> float | None:
        """The newest recorded value."""
        values = (record[key] for record in reversed(self.records) if is_number(record.get(key)))
        return next(values, None)

    def median(self, key: str) -> float | None:
        values = [record[key] for record in self.records if is_number(record.get(key))]
        return statistics.median(values) if values else None


def read_run(directory: Path) -> RunFiles:
    """A run's files.  Raises ConfigError if it is not a run, and CheckpointError for damaged records or status."""
    for path in (directory / name for name in READ_FILES):
        if path.is_symlink():  # the page may be shown to others, who could not read the link's target
            raise ConfigError(f"{path}: is a link, and may lead to what is not the run's. Put the file itself there.")
    status = Status.read(directory)
    if status is None and not (directory / CONFIG_FILE).exists():
        load_run(directory)  # raises, naming what is missing
    run = RunFiles(directory, directory.resolve().name, status=status)
    run.config_text, run.generated = (_read_text(directory / name) for name in (CONFIG_FILE, "samples.txt"))
    run.records = read_records(directory / "metrics.jsonl")
    if status:
        run.written = datetime.fromtimestamp(status.path.stat().st_mtime, UTC)
        run.killed = status.state == "running" and was_killed(directory)
    try:
        tree, _ = syntax.read(run.config_text)
        if isinstance(tree, dict) and "base" in tree:
            raise ConfigError(f"its {CONFIG_FILE} has a base, as that of no run has, which may be any file.")
        run.config = load_run(directory)
        run.name = run.config.run.name
        _plan_layout(run, run.config)
    except ConfigError as error:
        run.problems.append(f"No layout, because the configuration is not valid here: {error}")
    return run


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, MOST_BYTES).decode(errors="replace")
    except OSError:  # missing, or unreadable
        return ""


def _plan_layout(run: RunFiles, config: RunConfig) -> None:
    """Plans for the devices of the run's newest attempt, with the expected collectives of a step."""
    devices, platform, kind = config.run.simulate_devices, "cpu", "cpu"
    if run.attempts:
        devices, platform, kind = run.attempts[-1].devices, run.attempts[-1].platform, run.attempts[-1].device_kind
    elif not devices:
        why = "an older version wrote its status.json" if run.status else "it has not been started"
        run.problems.append(f"No layout, because what this run runs on is not recorded: {why}.")
        return
    why = f"{devices:,} devices are more than a page shows" if devices > MOST_SHOWN else ""
    if platform not in COMPILERS:
        why = f"it ran on devices of another kind: {platform:.40}"
    if why:
        run.problems.append(f"No layout, because {why}.")
        return
    try:
        plan = abstract_plan(config, devices, platform, kind)
    except LayoutError as error:  # status.json does not say how many devices its hosts had
        run.problems.append(f"No layout, if its hosts are those of the hardware table: {error}")
        return
    run.plan = describe(config, plan)
    run.collectives = [asdict(row) for row in expected_collectives(config, plan)]


def write_report(directories: Sequence[Path], out: Path | None) -> Path:
    """Writes the page of these runs to `out`, by default report.html of the first; returns its path.  Raises like
    read_run, and ConfigError if the page cannot be written."""
    path = directories[0] / "report.html" if out is None else out
    if path.suffix not in (".html", ".htm") or path.is_dir():
        raise ConfigError(f"--out {path}: is not an HTML file. Give a file that ends in .html.")
    text = make_page(directories)
    try:
        write_atomically(path, text)
    except OSError as error:
        where = f"--out {path}" if out else f"{path}"
        raise ConfigError(f"{where}: cannot be written: {error.strerror}. Give another file with --out.") from error
    return path


def make_page(directories: Sequence[Path]) -> str:
    """The HTML of the report on these runs.  Raises like read_run."""
    runs = list(_named(read_run(each) for each in dict.fromkeys(path.resolve() for path in directories)).items())
    alone = len(runs) == 1
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = runs[0][0] if alone else f"{len(runs)} runs"
    where = f"{runs[0][1].directory}, " if alone else ""
    page = Page(title, f"{where}spmd_lm {spmd_lm.__version__}, {made}")
    named = dict(runs)
    if alone:
        page.section("", facts(summarize(runs[0][1])), *map(notice, runs[0][1].problems))
    else:
        page.section("Comparison", *compare(named))
        page.section("What differs in their configurations", config_differences(named))
    page.section("Training", *metric_figures({name: run.records for name, run in runs}))
    page.section("Experts", expert_figures(named))
    page.section("Costs", costs(named))
    for i, (name, run) in enumerate(runs):
        if alone:
            page.section("Layout", layout(run, "layout"))
            page.section("Starts", attempt_table(run))
            page.section("Generated text", *generated_text(run))
            page.section("Configuration", _config_details(run))
        else:
            blocks = [facts(summarize(run)), *map(notice, run.problems), layout(run, f"run{i}"), attempt_table(run)]
            blocks += generated_text(run)
            page.section("Each run" if i == 0 else "", details(name, *blocks, _config_details(run)))
    return page.html()


def _config_details(run: RunFiles) -> Content:
    return details(CONFIG_FILE, preformatted(run.config_text)) if run.config_text else ""


def _named(runs: Iterator[RunFiles]) -> dict[str, RunFiles]:
    """Runs by name, or by directory if names clash."""
    all_runs = list(runs)
    names = [run.name for run in all_runs]
    return {run.name if names.count(run.name) == 1 else str(run.directory): run for run in all_runs}


# ---- numbers


def format_state(run: RunFiles) -> str:
    """The run's state; if it failed, with the reason."""
    status = run.status
    if status is None:
        return "not started"
    if status.state == "running" and run.written:
        return f"{'killed after' if run.killed else 'running at'} {run.written:%Y-%m-%d %H:%M} UTC"
    return f"failed: {_format_exit(status.exit_code)}" if status.state == "failed" else status.state


def _format_exit(code: int | None) -> str:
    known = {each.value: each.name.lower().replace("_", " ") for each in Exit}
    return "killed" if code is None else f"{known.get(code, 'error')} ({code})"


def summarize(run: RunFiles) -> dict[str, str]:
    """The most important numbers that are known, by name."""
    status, plan = run.status, run.plan
    of_all = f" of {run.config.train.steps:,}" if run.config else ""
    seconds = status.goodput if status else {}
    total = sum(seconds.values())
    values = {
        "state": format_state(run),
        "steps": f"{status.step if status else 0:,}{of_all}",
        "loss": _format(run.last("loss"), "{:.4f}".format),
        "eval loss": _format(run.last("eval_loss"), "{:.4f}".format),
        "tokens/s, median": _format(run.median("tokens_per_second"), format_quantity),
        "MFU, median": _format(run.median("mfu"), "{:.1%}".format),
        "time": _format(total or None, format_duration),
        "time in steps": _format(seconds.get("step", 0) / total if total else None, "{:.0%}".format),
        "restarts": str(status.restarts) if status else "",
    }
    if plan:
        divided = [f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1]
        values["parameters"] = format_quantity(plan["parameter_count"])
        values["devices"] = f"{plan['devices']} {plan['platform']}"
        values["layout"] = " × ".join(divided) or "one device"
        values["memory planned"] = format_bytes(sum(plan["memory"].values()))
    values["memory measured"] = _format(peak_bytes(run), format_bytes)
    return {name: value for name, value in values.items() if value}


def _format(value: float | None, formatter: Callable[[float], str]) -> str:
    return "" if value is None else formatter(value)


def peak_bytes(run: RunFiles) -> int | None:
    """Peak memory of a device in any attempt; None if not measured."""
    return max((attempt.peak_bytes for attempt in run.attempts if attempt.peak_bytes is not None), default=None)


def compare(runs: Mapping[str, RunFiles]) -> list[Content]:
    """A table with a row for each run, and their problems."""
    summaries = {name: summarize(run) for name, run in runs.items()}
    header = list(dict.fromkeys(key for summary in summaries.values() for key in summary))
    rows = [[name, *(summary.get(key, UNKNOWN) for key in header)] for name, summary in summaries.items()]
    problems = [notice(f"{name}: {problem}") for name, run in runs.items() for problem in run.problems]
    return [table(["run", *header], rows), *problems]


def config_differences(runs: Mapping[str, RunFiles]) -> Content:
    """A table of keys whose values differ between runs."""
    configs = {name: run.config.by_key for name, run in runs.items() if run.config}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    rows = []
    for key in keys:
        values = [to_json(config[key]) if key in config else UNKNOWN for config in configs.values()]
        if len(set(values)) > 1 and key not in ("run.name", "run.dir"):
            rows.append([key, *values])
    return table(["key", *configs], rows) if rows else "Only their names." if len(configs) > 1 else ""


# ---- pictures


def metric_figures(runs: Mapping[str, Sequence[Record]]) -> list[Content]:
    """One figure for each metric recorded by any run."""
    recorded = {key for records in runs.values() for record in records for key, value in record.items() if value}
    if not recorded:
        return ["No metrics yet: the first are written after train.log_every steps."]
    known = [key for key in METRICS if {key, f"eval_{key}"} & recorded]
    others = sorted({key.removeprefix("eval_") for key in recorded} - {*METRICS, *NOT_DRAWN})
    figures = [figure(plots.curves(runs, key), f"metric-{key}".replace("_", "-")) for key in known]
    figures += [figure(plots.curves(runs, key), f"other-{i}") for i, key in enumerate(others[:MOST_OTHERS])]
    return [cards(*figures)]


def expert_figures(runs: Mapping[str, RunFiles]) -> Content:
    """What experts received in the newest logged step of each run that has some."""
    newest = {name: _newest_load(run.records) for name, run in runs.items()}
    drawn = [(name, record) for name, record in newest.items() if record]
    figures = [
        figure(plots.expert_load(record["expert_load"]), f"experts-{i}", f"{name}, step {record['step']:,}")
        for i, (name, record) in enumerate(drawn)
    ]
    return cards(*figures) if figures else ""


def _newest_load(records: Sequence[Record]) -> Record | None:
    """The newest record with a table of numbers as expert_load."""
    return next((record for record in reversed(records) if _is_load(record.get("expert_load"))), None)


def _is_load(load: Any) -> bool:
    """True for a table of numbers, at least one."""
    if not (isinstance(load, list) and load and all(isinstance(layer, list) and layer for layer in load)):
        return False
    return len({len(layer) for layer in load}) == 1 and all(is_number(each) for layer in load for each in layer)


def costs(runs: Mapping[str, RunFiles]) -> Content:
    """Memory and time of all runs; for a single run also what its step sends."""
    plans = {name: run.plan for name, run in runs.items() if run.plan}
    spent = {name: run.status.goodput for name, run in runs.items() if run.status and any(run.status.goodput.values())}
    blocks: list[Content] = []
    if plans:
        one_plan = next(iter(plans.values())) if len(runs) == 1 else plans
        blocks.append(figure(plots.memory(one_plan), "memory", _measured_memory(runs)))
    if spent:
        caption = "Wall-clock time of all starts. Compiling and saving are paid once, or now and then."
        blocks.append(figure(plots.goodput(spent), "goodput", caption))
    if len(runs) == 1:
        blocks += [collectives_figure(run, "collectives") for run in runs.values()]
    return cards(*blocks)


def _measured_memory(runs: Mapping[str, RunFiles]) -> str:
    peaks = {name: peak for name, run in runs.items() if (peak := peak_bytes(run)) is not None}
    measured = [(f"{name}: " if len(runs) > 1 else "") + format_bytes(peak) for name, peak in peaks.items()]
    if not measured:
        return "Planned. The backend did not count what was used."
    return f"Planned. Most that one device used: {', '.join(measured)}."


def collectives_figure(run: RunFiles, name: str) -> Content:
    if not run.plan or run.plan["devices"] == 1:
        return ""
    caption = "By the papers' formulas; spmd-lm audit compares them with the compiled step."
    return figure(plots.collectives(run.collectives), name, caption)


def layout(run: RunFiles, name: str) -> Content:
    """The mesh of devices, and the pipeline's schedule."""
    if not run.plan:
        return ""
    plan = run.plan
    options = [f"ZeRO-{plan['zero']}"] + ["sequence parallelism"] * plan["sequence"]
    options += [f"remat {plan['remat']}", f"attention {plan['attention']['kernel']}"]
    caption = f"{pluralize(plan['devices'], 'device')}, {', '.join(options)}, compute {plan['precision']['compute']}"
    blocks: list[Content] = [figure(plots.mesh(plan), f"{name}-mesh", caption)]
    if name != "layout":  # else among the costs
        blocks.append(collectives_figure(run, f"{name}-collectives"))
    if plan["pipeline"]:
        note = "Numbers are microbatches. Backward is drawn twice as long as forward."
        blocks.append(figure(plots.schedule(plan), f"{name}-schedule", note))
    return cards(*blocks)


def attempt_table(run: RunFiles) -> Content:
    """A table of the recorded attempts."""
    if not run.status:
        return ""
    if not run.attempts:
        return "The version of spmd_lm that trained this run did not record its starts."
    running = len(run.attempts) - 1 if run.status.state == "running" and not run.killed else None
    rows = []
    for i, attempt in enumerate(run.attempts):
        steps = f"{attempt.first_step}–{attempt.last_step}" if attempt.last_step >= attempt.first_step else UNKNOWN
        ended = "running" if i == running else _format_exit(attempt.exit_code)
        peak = UNKNOWN if attempt.peak_bytes is None else format_bytes(attempt.peak_bytes)
        started, seconds = attempt.started.replace("T", " ").replace("+00:00", ""), format_duration(attempt.seconds)
        where = f"{attempt.devices} x {attempt.device_kind}"
        rows.append([started, steps, seconds, ended, where, str(attempt.processes), peak])
    forgotten = run.status.restarts + 1 - len(run.attempts)
    note = f"{pluralize(forgotten, 'earlier start')} not recorded." if forgotten > 0 else ""
    header = ["started (UTC)", "steps", "time", "ended", "devices", "processes", "peak memory"]
    return join([table(header, rows), note])


def generated_text(run: RunFiles) -> list[Content]:
    text = run.generated
    if not text.strip():
        return []
    cut = text[:MOST_CHARACTERS] + ("\n[...]" if len(text) > MOST_CHARACTERS else "")
    return [card("samples.txt", preformatted(cut))]
