"""The public functions, for notebooks, scripts and the commands; `import spmd_lm` imports this module on first use.

    config = spmd_lm.load_config("configs/debug.yaml", "parallel.model=2", "run.simulate_devices=8")
    print(spmd_lm.plan(config))
    run = spmd_lm.train(config)
    spmd_lm.evaluate(run), spmd_lm.generate(run, "def main(")

The first function that computes sets up simulated devices; jax cannot change them later."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_lm.addresses import is_bucket
from spmd_lm.analysis.topology import Topology, parse_topology
from spmd_lm.config.load import load, load_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.runtime.child import run_in_child
from spmd_lm.runtime.compilation_cache import NONE
from spmd_lm.runtime.devices import set_up_devices, use_cpu_alone
from spmd_lm.runtime.formatting import LARGEST_PRICE, LARGEST_TOKENS
from spmd_lm.runtime.outputs import require_replaceable
from spmd_lm.runtime.signals import StopSignals

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from spmd_lm.batch import Batch
    from spmd_lm.generation.fill_mask import Prediction
    from spmd_lm.models.language_model import LanguageModel


def __getattr__(name: str) -> Any:
    """Imports classes that need jax on first use."""
    if name == "Program":
        from spmd_lm.step.program import Program

        return Program
    if name == "ModelModules":
        from spmd_lm.models.modules import ModelModules

        return ModelModules
    raise AttributeError(f"module 'spmd_lm.api' has no attribute '{name}'")


class Report(dict):
    """A result as plain data, as --json writes it; str(report) is the command's text."""

    def __init__(self, data: dict[str, Any], text: str):
        super().__init__(data)
        self.text = text

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__  # shown by notebooks


def load_config(path: str | Path, *overrides: str) -> RunConfig:
    """The configuration in a YAML file, or of the run in a directory or a bucket, changed by overrides,
    `section.key=value`.

    Raises ConfigError with one line per problem."""
    path = _local(path)
    return (load_run if path.is_dir() else load)(path, overrides)


def plan(config: RunConfig, topology: str | None = None) -> Report:
    """Mesh, shardings, memory and pipeline of a run, without its devices.
    topology: devices, as in "v5p:4x4x4", present or not; None for simulated or present ones.
    Raises LayoutError if there is no plan, and ConfigError for an unknown topology."""
    target = parse_topology(topology) if topology is not None else None
    from spmd_lm.planning.plan_report import describe, render

    description = describe(_on(target, config), topology=target) if target else describe(config)
    return Report(description, render(description))


def search_layouts(
    config: RunConfig,
    topologies: Sequence[str],
    top: int = 1,
    out: str | Path | None = None,
    hardware: str | Path | None = None,
) -> Report:
    """Costs every layout of a run on the hardware in `topologies`, as in ["h100:8x8", "v5p:4x4x4"], without compiling,
    then compiles them, fastest first, until `top` of them fit; the first that fits is the best one.

    out: a file for the configuration with the best layout; new, or from an earlier search.
    hardware: a file written by `spmd-lm bench --calibrate`, preferred to published speeds.

    Raises ConfigError if none fits or the hardware's speed is unknown, and OutputError for another existing file."""
    if not topologies or top < 0:
        raise ConfigError(
            f"search_layouts needs a topology, and top of 0 or more, not {top}. Name one, as in h100:8x8."
        )
    targets = [parse_topology(topology) for topology in topologies]
    from spmd_lm.planning import search, search_report

    if out is not None:
        require_replaceable("--out", Path(out), search_report.MARK)
    found = search.search(config, search.make_targets(targets, Path(hardware) if hardware is not None else None))
    best, compiled, notice = search_report.confirmed_best(found, top, audit)
    if out is not None:
        search_report.write_best(best, Path(out))
    description = search_report.describe(found, best, compiled, notice)
    return Report(description, search_report.render(description))


def preflight(
    config: RunConfig,
    topology: str,
    price: float | None = None,
    tokens: float | None = None,
    picture: str | Path | None = None,
    hardware: str | Path | None = None,
) -> Report:
    """Compiles the train step for `topology`, as in "v5p:4x4x4", which need not be present: memory against capacity,
    collectives with their seconds, FLOPs, and ranges of a step's time and of the run's days and cost.

    price: per device and hour.
    tokens: number that the run trains on; None for those of train.steps.
    picture: a file for a drawing of one step, by stage.
    hardware: as for `search_layouts`.

    Results are cached in the user's cache directory, unless run.compilation_cache=none.  Raises ConfigError for
    hardware of unknown speed, and if the step cannot be compiled."""
    for name, given, most in (("price", price, LARGEST_PRICE), ("tokens", tokens, LARGEST_TOKENS)):
        if given is not None and (not isinstance(given, (int, float)) or given is True or not 0 < given <= most):
            raise ConfigError(f"{name} is {given!s:.40}: give a number above 0, at most {most:g}.")
    target = parse_topology(topology)
    if target.platform == "cpu":
        raise ConfigError(f"--topology {topology}: a CPU's schedule tells nothing of other devices. Use spmd-lm bench.")
    paths = (None if path is None else Path(path) for path in (picture, hardware))
    return run_in_child(topology, _preflight, config, target, price, tokens, *paths)


def _preflight(
    config: RunConfig,
    target: Topology,
    price: float | None,
    tokens: float | None,
    picture: Path | None,
    hardware: Path | None,
) -> Report:
    use_cpu_alone()
    from spmd_lm.planning import preflight as planning
    from spmd_lm.planning.search import make_targets
    from spmd_lm.runtime.compilation_cache import cache_directory

    if picture is not None and picture.suffix not in planning.PICTURES:
        raise ConfigError(f"--picture {picture}: its name must end in {' or '.join(planning.PICTURES)}.")
    (on,) = make_targets([target], hardware)
    directory = cache_directory(config.run.compilation_cache, "preflight")
    found = planning.cached(directory, config, on, lambda: planning.preflight(config, on))
    result = planning.with_costs(found | {"software": on.software.share}, price, tokens)
    if picture is not None:
        planning.draw(config, result, picture)
    return Report(result, planning.render(result))


def audit(config: RunConfig, topology: str | None = None, hlo: str | Path | None = None) -> Report:
    """Compiles the train step for `topology`, as in "v5p:4x4x4", present or not (None: for the present devices), and
    compares its collectives with the expected ones; report["ok"] if they agree.
    hlo: a file for the text of the compiled program.
    Raises ConfigError if the step cannot be compiled, and OutputError if the file cannot be written."""
    file = None if hlo is None else Path(hlo)
    if topology is None:
        return _audit(config, None, file)
    target = parse_topology(topology)
    return run_in_child(topology, _audit, _on(target, config), target, file)


def _audit(config: RunConfig, target: Topology | None, hlo: Path | None) -> Report:
    if target and target.platform != "cpu":
        use_cpu_alone()  # before jax starts: it compiles ahead of time
        config = _with_run(config, compilation_cache=NONE)  # jax 0.10 cannot load such programs from a cache
    set_up_devices(config)
    from spmd_lm.planning.audit import audit, render

    result = audit(config, target, hlo)
    return Report(result, render(result))


def train(config: RunConfig) -> Path:
    """Trains, or resumes, the run in run.dir; returns that directory.  Raises KeyboardInterrupt if a signal stopped it;
    finished steps are saved then."""
    with StopSignals() as signals:  # from here on: the import below takes seconds
        set_up_devices(config)
        from spmd_lm.training.loop import train

        code = train(config, signals)
    if code != Exit.DONE:
        raise KeyboardInterrupt(f"stopped; training {config.run.directory} again resumes it")
    return config.run.directory


def evaluate(
    run: str | Path | RunConfig, fallback: bool = False, tasks: Sequence[str] = (), stride: int | None = None
) -> dict[str, Any]:
    """Metrics of a run's newest checkpoint on its validation data.

    run: its directory, or a configuration.
    fallback: use the newest undamaged checkpoint.
    tasks: zero-shot tasks, NAME or NAME=PATH, to evaluate in place of the validation data, as in ["validation",
      "lambada=lambada.jsonl"].
    stride: tokens by which the window over a text moves (docs/evaluation.md)."""
    config = set_up_devices(_run_config(run))
    if tasks or stride is not None:
        from spmd_lm.evaluation.zero_shot import evaluate_tasks

        return evaluate_tasks(config, tasks, stride, fallback)
    from spmd_lm.evaluation.evaluate import evaluate_run

    return evaluate_run(config, fallback)


def generate(run: str | Path | RunConfig, prompt: str = "", **sampling: Any) -> str:
    """`prompt` and its continuation by a run's newest checkpoint.

    run: its directory, or a configuration.
    sampling: fields of generation.sampling.Sampling, such as tokens=100, temperature=0.8."""
    from spmd_lm.generation.sampling import Sampling

    options = Sampling(**sampling)
    config = set_up_devices(_run_config(run))
    from spmd_lm.generation.generate import generate_run

    return generate_run(config, [prompt], options)[0]


def fill_mask(run: str | Path | RunConfig, text: str, top: int = 5) -> "list[list[Prediction]]":
    """The `top` likeliest tokens for each [MASK] (one token) in `text`, with their probabilities, likeliest first, by
    the newest checkpoint of a masked_lm run.  run: its directory, or a configuration."""
    config = set_up_devices(_run_config(run))
    from spmd_lm.generation.fill_mask import fill_mask_run

    return fill_mask_run(config, text, top)


def make_model(config: RunConfig) -> "LanguageModel":
    """The model of a configuration, for the user's own training loop: see docs/own-loop.md.  Raises ConfigError for one
    with adapters, codes or matmuls in eight bits."""
    import jax

    if config.adapter.kind != "none":
        raise ConfigError(
            f"adapter.kind={config.adapter.kind}: a loop of one's own would train its base too. Use spmd-lm train, or "
            "adapter.kind=none."
        )
    if config.precision.quantized != "none":
        problem = f"precision.quantized={config.precision.quantized}: a loop of one's own cannot train codes"
        raise ConfigError(f"{problem}. Use precision.quantized=none.")
    if config.precision.matmul != "none":
        problem = (
            f"precision.matmul={config.precision.matmul}: a scale is of one device's shard, and a loop of one's own"
        )
        raise ConfigError(f"{problem} has global arrays. Use precision.matmul=none.")
    set_up_devices(config)
    from spmd_lm.resolve import enable_float64, make_model

    enable_float64(config)
    return make_model(config, jax.default_backend(), device_kind=jax.devices()[0].device_kind)


def axis_rules(**axes: str | tuple[str, ...]) -> "AbstractContextManager[None]":
    """A context, within jax.set_mesh, that traces models with their dimensions sharded over these mesh axes, as in
    axis_rules(batch="data", heads="model", mlp="model", vocab="model").  zero: the axes of batch over which ZeRO shards
    the width of matrices between uses (docs/own-loop.md).  Raises LayoutError."""
    import jax

    from spmd_lm.active_rules import use_axis_rules
    from spmd_lm.parallel.own_mesh import rules_on_mesh

    return use_axis_rules(rules_on_mesh(jax.sharding.get_abstract_mesh(), axes))


def param_shardings(model: "LanguageModel") -> dict[str, Any]:
    """Shardings of a model's parameters by the mesh and the rules of this context: a tree of NamedShardings.  Raises
    LayoutError without them, and for sizes that the mesh does not divide."""
    from spmd_lm.parallel import own_mesh

    return own_mesh.param_shardings(model.names, model.shapes, dict(model.modules.rules))


def report(*runs: str | Path, out: str | Path | None = None) -> Path:
    """Writes an HTML page about a run, or several overlaid, and returns its path, by default report.html in the first
    run's directory.  Starts no devices.  Raises ConfigError if a directory is no run or the page cannot be written, and
    CheckpointError if a run's records are damaged; nothing is written then."""
    from spmd_lm.reports.runs import write_report

    return write_report([_local(run) for run in runs], None if out is None else Path(out))


def read_batch(config: RunConfig, step: int = 1) -> "Batch":
    """The rows that the run trains on in `step`, counted from 1, under any layout.  Fields are numpy arrays, such as
    the input tokens [train.batch, model.context], and the targets."""
    from spmd_lm.checkpoints.saved_run import load_run_data
    from spmd_lm.data.corpus import make_loader

    if step < 1:
        raise ConfigError(f"step={step}: a run's steps are counted from 1.")
    return make_loader(config, load_run_data(config), "training").rows(step - 1, 0, config.train.batch)


def _run_config(run: str | Path | RunConfig) -> RunConfig:
    if not isinstance(run, RunConfig):
        return load_run(_local(run))
    if run.run.bucket_address:
        _local(run.run.bucket_address)
    return run


def _local(run: str | Path) -> Path:
    """The directory of a run, or the working copy of one in a bucket."""
    if not is_bucket(str(run)):
        return Path(run)
    from spmd_lm.checkpoints.bucket_run import fetch_run

    return fetch_run(str(run))


def _on(target: Topology, config: RunConfig) -> RunConfig:
    """The run on these devices alone: simulated if they are, else none."""
    return _with_run(config, simulate_devices=target.simulated)


def _with_run(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update=changes)})
