"""Training, from a config to an exit code.

Step k + 1 depends on the state after step k and the config alone, so a run may stop anywhere and resume from its newest
checkpoint as if it had not stopped."""

import io
import signal
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import jax

from spmd_lm.checkpoints.init_from import PretrainedRun
from spmd_lm.checkpoints.restored import meta_of_base, restore_state
from spmd_lm.checkpoints.saved_run import check_data, rules_of
from spmd_lm.config.data_sections import Data, Synthetic
from spmd_lm.config.load import data_of_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import Dataset, load_data, make_loader
from spmd_lm.data.loader import Loader, batches_ahead
from spmd_lm.data.tokenizers.tokenizer import hash_of_vocabulary
from spmd_lm.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError, Exit, OutputError
from spmd_lm.evaluation.tasks.task import EvalTask
from spmd_lm.evaluation.zero_shot import make_tasks, naming
from spmd_lm.files import write_atomically
from spmd_lm.generation.generate import encode_prompt, generate_text
from spmd_lm.generation.sampling import Sampling
from spmd_lm.planning import plan_report
from spmd_lm.runtime.formatting import format_duration, pluralize
from spmd_lm.runtime.metrics import NONE_SAVED, Clock, Record, lower_is_better, read_records
from spmd_lm.runtime.outputs import writing
from spmd_lm.runtime.processes import assert_equal
from spmd_lm.runtime.progress import Progress, format_record
from spmd_lm.runtime.signals import StopSignals
from spmd_lm.runtime.trackers import require_packages
from spmd_lm.runtime.watchdog import StepWatch
from spmd_lm.step.own_check import check_own_modules
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from spmd_lm.training.run import HOOKS, TrainingRun
from spmd_lm.training.run_dir import RunDir, mark_failed, open_run_dir

ACTIVITIES = dict.fromkeys(("step", "data", "other"), "step")
ACTIVITIES |= {"checkpoint": "checkpoint", "eval": "evaluation"}
"""Activities with a time limit, train.watchdog, by the clock's buckets."""

PROMPTS = ["", "The ", "def "]  # continued in samples.txt


def train(config: RunConfig, signals: StopSignals | None = None, fallback: bool = False) -> Exit:
    """Trains the run in run.dir up to train.steps, from its newest checkpoint if any; damaged ones are moved aside.

    signals: None if the caller does not watch any.
    fallback: take run.init_from's newest undamaged checkpoint.

    Raises ConfigError for an impossible layout or a directory that cannot be written or is in use, CheckpointError for
    a run of another model or checkpoints that are all damaged or not saved, DataError, and NonFiniteError; none of them
    harms earlier checkpoints."""
    progress = Progress(config.train.steps, process=jax.process_index(), processes=jax.process_count())
    watched: AbstractContextManager[StopSignals] = nullcontext(signals) if signals else StopSignals()
    with watched as signals, open_run_dir(config, progress.log) as tiers:
        while True:
            try:
                return train_from_newest(RunDir(config, tiers), progress, signals, fallback)
            except DamagedCheckpointError as damage:
                tiers.quarantine(damage)


def train_from_newest(run_dir: RunDir, progress: Progress, signals: StopSignals, fallback: bool) -> Exit:
    """One try at `train`; raises DamagedCheckpointError before the first step is done and any file is written."""
    config, messages = run_dir.config, run_dir.check_config()
    run_dir.check_resumable()
    if run_dir.finished_steps >= config.train.steps:
        progress.log(*messages, run_dir.finished_message())
        return Exit.DONE
    require_packages(config.run.trackers or [])
    status = run_dir.next_status()
    clock = Clock(status.goodput)
    with clock.time("init"):
        program = Program(config)
        progress.log(plan_report.summary(plan_report.describe(config, program.plan)))
        progress.log(*program.xla_options.lines)
        if notice := check_own_modules(config, program.model.modules, program.plan):
            progress.log(notice)
    with mark_failed(status, clock), closing(program):
        with clock.time("init"):
            # The run to initialize from and the data may reject the config, before any file is written.
            init_from = config.run.init_from if run_dir.saved_step is None else None
            pretrained = PretrainedRun(program, Path(init_from).expanduser(), fallback) if init_from else None
            if config.precision.quantized != "none" and run_dir.saved_step is None and not pretrained:
                problem = f"{config.precision.few_bits}: {run_dir.path} would begin with codes of random matrices"
                raise ConfigError(f"{problem}. Train it first, then quantize it: spmd-lm quantize.")
            corpus, vocabulary, loader, validation = open_data(run_dir, progress, messages)
            tasks = open_tasks(config, corpus)
            state = initial_state(run_dir, program, pretrained, progress)
            base = meta_of_base(run_dir.meta, program, pretrained, lambda: program.canonical(state).params)
            if base and pretrained:
                checkpoint = pretrained.checkpoints.path(pretrained.step)
                progress.log(f"checkpoints hold what is trained alone, and go with {checkpoint}: keep that one.")
        with run_dir.open_files(status, corpus.tokenizer, progress.log) as metrics_log:
            run = TrainingRun(
                program=program,
                corpus=corpus,
                vocabulary=vocabulary,
                rules=rules_of(run_dir.meta),
                validation=validation,
                tiers=run_dir.tiers,
                status=status,
                clock=clock,
                metrics_log=metrics_log,
                progress=progress,
                state=state,
                base=base,
                tasks=tasks,
            )
            if run.replica_check and not run.replica_check.has_copies():
                progress.log("train.replica_check_every: this layout has one copy of each array: nothing to compare.")
            with StepWatch(config.train.watchdog, lambda: ACTIVITIES.get(clock.bucket, ""), run.report_hang) as watch:
                train_steps(run, loader, signals, watch)
                save_last(run)
            return finish(run) if run.step >= config.train.steps else stop(run, signals)


def open_data(run_dir: RunDir, progress: Progress, messages: list[str]) -> tuple[Dataset, str, Loader, Loader | None]:
    """The data, the hash of its vocabulary, and the loaders of training and validation.  messages: to log too."""
    config = run_dir.config
    data = config.data if run_dir.saved_step is None else data_of_run(config)
    corpus = load_data(data, config.train.seed, config.model.vocab, rules_of(run_dir.meta), config.model.context)
    vocabulary = hash_of_vocabulary(corpus.tokenizer, data.tokenizer) if isinstance(data, Data) else ""
    assert_equal("dataset", {"sha256": corpus.fingerprint, "vocabulary": vocabulary})
    loader = make_loader(config, corpus, "training")
    validation = make_loader(config, corpus, "validation") if config.train.eval_every else None
    progress.log(corpus.describe(), *messages)
    for prompt, why in unreadable_prompts(config, corpus).items():
        progress.log(f"samples.txt leaves out the prompt {prompt!r}: {why}")
    if run_dir.saved_step is not None:
        progress.log(*check_data(run_dir.meta, config, corpus.fingerprint, corpus.name))
    return corpus, vocabulary, loader, validation


def open_tasks(config: RunConfig, corpus: Dataset) -> list[EvalTask]:
    if not config.train.eval_tasks:
        return []
    with naming("train.eval_tasks"):
        return make_tasks(config, config.train.eval_tasks, data=corpus)


def initial_state(
    run_dir: RunDir, program: Program, pretrained: PretrainedRun | None, progress: Progress
) -> TrainState:
    """The newest saved state, or the state before the first step, on devices."""
    saved_step, path = run_dir.saved_step, run_dir.path
    if not run_dir.config.checkpoint.every:
        progress.log("checkpoint.every=0: nothing will be saved at the end; set it to evaluate, generate or continue.")
    if best := run_dir.config.checkpoint.keep_best:
        extreme = "lowest" if lower_is_better(best) else "highest"
        progress.log(f"checkpoint.keep_best={best}: the checkpoint with the {extreme} is kept beside the newest.")
    if saved_step is None:
        origin = pretrained.describe() if pretrained else "starting"
        progress.log(f"{path}: {origin}; {pluralize(progress.steps, 'step')} to go")
        return pretrained.initial_state() if pretrained else program.init()
    is_local = run_dir.checkpoints is run_dir.tiers.local
    where = f", from {run_dir.checkpoints.path(saved_step)}" if is_local else ""
    progress.log(f"{path}: resuming after step {saved_step} of {progress.steps}{where}")
    return program.from_canonical(restore_state(run_dir.checkpoints, saved_step, program))


def train_steps(run: TrainingRun, loader: Loader, signals: StopSignals, watch: StepWatch) -> None:
    """Compiles, then loops up to train.steps, or until a signal comes."""
    if signals.received is None:  # compiling may outlast the grace period of a preempted job
        with run.progress.compiling(run.status.compile_seconds), run.clock.time("compile"):
            run.status.compile_seconds = run.program.compile()
        run.write_status()
        run.tiers.delete_newer(run.step)
    if run.failure:
        signals.stop()
    done, last, shardings = run.step, run.config.train.steps, run.program.batch_shardings
    alone = {step - 1 for step in run.steps_of_first_executions()}
    with run.progress.live_line(), batches_ahead(loader, shardings, range(done, last), alone) as batches:
        for step in signals.until_received(range(done + 1, last + 1)):
            with run.clock.time("data"):
                batch = next(batches)
            with run.clock.time("step"):
                run.advance(step, *run.program.step(run.state, batch))
                del batch  # so that freeing it does not count as waiting for data
            for hook in HOOKS:
                hook(run)
            watch.beat(step)
            if run.failure:
                signals.stop()


def save_last(run: TrainingRun) -> None:
    """Waits for the save in progress; a run that stops early saves, even with checkpoint.every=0, unless no step was
    done."""
    run.end_profile()
    with run.clock.time("checkpoint"):
        try:
            run.wait_for_save()
            if run.step not in (0, run.status.saved_step, run.config.train.steps):
                run.save()
                run.wait_for_save()
        except (CheckpointError, OutputError):  # perhaps caused by the same disk
            raise_failure(run)
            raise
    raise_failure(run)


def finish(run: TrainingRun) -> Exit:
    """Writes loss.png and samples.txt; only then is the run done."""
    texts = sample(run)  # in every process: the parameters are sharded over them
    if run.metrics_log is not None:
        records, directory = read_records(run.metrics_log.path), run.config.run.directory
        with writing(directory / "loss.png"):
            picture = draw_loss(records, f"{run.config.run.name}: {run.corpus.name}")
            write_atomically(directory / "loss.png", picture)
        if texts:
            with writing(directory / "samples.txt", len(texts)):
                write_atomically(directory / "samples.txt", texts)
        seconds, total_seconds = run.clock.elapsed()
        message = f"done: step {run.step}{format_record(records[-1] if records else {})}  in {format_duration(seconds)}"
        if restarts := run.status.restarts:
            message += f", {format_duration(total_seconds)} in total with {pluralize(restarts, 'restart')}"
        run.progress.log(message)
    if (saved_step := run.status.saved_step) != run.step:
        nothing = "Nothing was saved" if saved_step == NONE_SAVED else f"Nothing was saved since step {saved_step}"
        run.progress.log(f"{nothing} (checkpoint.every=0): set it to evaluate, generate or continue from the end.")
    run.write_status(state="done", exit_code=int(Exit.DONE))
    raise_failure(run)
    return Exit.DONE


def draw_loss(records: list[Record], title: str) -> bytes:
    """Training and evaluation loss over steps, as a PNG."""
    from spmd_lm.plots.lines import curves  # takes 0.5 s

    file = io.BytesIO()
    curves(records, title=title, size=(8, 4.5)).savefig(file, dpi=150, format="png")
    return file.getvalue()


def sample(run: TrainingRun) -> str:
    """Continuations of PROMPTS; none if the data is not text or the model cannot generate."""
    left_out = unreadable_prompts(run.config, run.corpus)
    prompts = [prompt for prompt in PROMPTS if prompt not in left_out]
    if isinstance(run.config.data, Synthetic) or not run.config.model.causal or not prompts:
        return ""
    if not run.program.model.modules.has_logits:
        return ""
    sampling, tokenizer = Sampling(temperature=0.8), run.corpus.tokenizer
    texts = generate_text(run.program, run.state.params, prompts, sampling, tokenizer)
    return f"\n{'-' * 80}\n".join(texts) + "\n"


def unreadable_prompts(config: RunConfig, corpus: Dataset) -> dict[str, str]:
    """PROMPTS that a text model cannot continue, with reasons: no token begins a document, or a token is not below
    model.vocab."""
    if isinstance(config.data, Synthetic) or not config.model.causal:
        return {}
    reasons = {}
    for prompt in PROMPTS:
        try:
            encode_prompt(corpus.tokenizer, prompt, config.model.vocab)
        except DataError as error:
            reasons[prompt] = str(error).partition(": ")[2].partition(". ")[0]
    return reasons


def stop(run: TrainingRun, signals: StopSignals) -> Exit:
    """Records and logs that the run stopped early, and was saved."""
    assert signals.received is not None
    code = Exit.INTERRUPTED if signals.received == signal.SIGINT else Exit.PREEMPTED
    run.write_status(state="preempted", exit_code=int(code))
    raise_failure(run)
    if run.step == 0:
        run.progress.log("stopped before the first step: nothing was done, so nothing was saved. Start it again.")
    else:
        done = f"stopped after step {run.step} of {run.config.train.steps}, saved"
        run.progress.log(f"{done}. The same command resumes from here.")
    return code


def raise_failure(run: TrainingRun) -> None:
    """Raises the error of a file that could not be written, with the newest saved step."""
    if run.failure:
        step = max(run.tiers.directories(), default=None)
        saved = f"Step {step} is saved: the same command goes on from there."
        nothing = "Nothing of the run is saved: the same command starts it again."
        raise OutputError(f"{run.failure} {nothing if step is None else saved}") from run.failure
