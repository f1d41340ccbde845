"""Training, from a config to an exit code.

Step k + 1 follows from the state after step k and the config alone, so that a run may stop anywhere and go on from its
newest checkpoint as if it had not."""

import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import jax

from spmd_lm.config.load import dump
from spmd_lm.config.schema import RunConfig, Synthetic
from spmd_lm.data.loader import Loader
from spmd_lm.data.sources import Corpus, load
from spmd_lm.errors import ConfigError, Exit, UserError
from spmd_lm.runtime.metrics import BUCKETS, Clock, MetricsLog, Status, plot_loss, read_records, write_atomically
from spmd_lm.runtime.progress import Progress, describe, duration
from spmd_lm.runtime.signals import StopSignals
from spmd_lm.train import plan as plans
from spmd_lm.train.checkpoint import Checkpointer, check_same_run
from spmd_lm.train.hooks import Evaluate, Log, Run, Save
from spmd_lm.train.program import Program
from spmd_lm.train.sample import Sampling, sample_text
from spmd_lm.train.state import TrainState

Hook = Callable[[Run], None]

STOPPED = {signal.SIGTERM: Exit.PREEMPTED, signal.SIGINT: Exit.INTERRUPTED}

PROMPTS = ["", "The ", "def "]  # of samples.txt


def train(config: RunConfig) -> Exit:
    """Trains the run in run.dir up to train.steps, from its newest checkpoint if it has one.

    Raises ConfigError for a layout that is impossible or a directory that cannot be written, CheckpointError for
    checkpoints of another model, damaged or not saved, DataError, and NonFiniteError; none harms what was saved before.
    """
    directory = config.run.directory
    progress = Progress(config.train.steps, quiet=jax.process_index() > 0)
    saves = Checkpointer(directory / "checkpoints", config.checkpoint.keep, config.checkpoint.asynchronous)
    with StopSignals() as signals, closing(saves):
        changes = changes_since(saves, config)
        before = Status.read(directory)
        if before and before.state == "done" and before.step >= config.train.steps:
            progress.say(f"{directory} has its {before.step} steps: nothing to do. Raise train.steps to go on.")
            return Exit.DONE

        status = next_life(directory, before, saves.latest() or 0)
        clock = Clock(status.goodput)
        with clock.time("init"):
            program = Program(config)
            progress.say(plans.summary(plans.describe(config, program.plan)))
            claim(directory)
            corpus = load(config.data, config.train.seed, config.model.vocab)
            loader = training_loader(config, corpus)
            progress.say(corpus.describe())
            for change in changes:
                progress.say(change)
        with recorded(config, status, clock) as log:
            with clock.time("init"):
                state, step = first_state(program, saves, corpus, progress)
            run = Run(config, program, corpus, saves, status, clock, log, progress, state, step)
            hooks: list[Hook] = [Evaluate(run), Log(run), Save(run)]
            with progress.compiling(usually=status.compile_seconds), clock.time("compile"):
                status.compile_seconds = program.compile()
            run.publish()
            take_steps(run, loader, hooks, signals)
            if run.step >= config.train.steps:
                return finish(run)
            assert signals.received is not None
            return stop(run, STOPPED[signals.received])


def training_loader(config: RunConfig, corpus: Corpus) -> Loader:
    t = config.train
    return Loader(corpus.train, config.model.context, t.batch, config.parallel.microbatches, t.seed)


def first_state(program: Program, saves: Checkpointer, corpus: Corpus, progress: Progress) -> tuple[TrainState, int]:
    """The newest saved state or the initial one, on devices, and its step."""
    newest = saves.latest()
    if newest is None:
        progress.say(f"starting, {progress.steps} steps to go")
        return program.init(), 0
    progress.say(f"resuming after step {newest} of {progress.steps}")
    canonical, meta = saves.restore(newest, program.abstract_canonical())
    if meta["data"]["fingerprint"] != corpus.fingerprint:
        progress.say("The text is not the one that this run was trained on so far: other batches from here on.")
    return program.place(canonical), newest


def take_steps(run: Run, loader: Loader, hooks: list[Hook], signals: StopSignals) -> None:
    """The loop: up to train.steps, or until a signal has come."""
    with run.progress.running():
        for step in signals.until_received(range(run.step + 1, run.config.train.steps + 1)):
            with run.clock.time("data"):
                batch = loader.batch(step - 1, run.program.batch_shardings)
            with run.clock.time("step"):
                run.follow(step, *run.program.step(run.state, batch))
            for hook in hooks:
                hook(run)


def finish(run: Run) -> Exit:
    """The last save on disk, loss.png, samples.txt; then, and only then, done."""
    with run.clock.time("checkpoint"):
        run.checkpoints.wait()
    texts = sample(run)  # on every process: the parameters are sharded over them
    if run.log is not None:
        run.clock.book()
        records = read_records(run.log.path)
        plot_loss(records, run.directory / "loss.png", f"{run.config.run.name}: {run.corpus.name}")
        if texts:
            write_atomically(run.directory / "samples.txt", texts)
        last = describe(records[-1]) if records else ""
        run.progress.say(f"done: step {run.step}{last}  in {duration(sum(run.status.goodput.values()))}")
    run.publish(state="done", exit_code=int(Exit.DONE))
    return Exit.DONE


def sample(run: Run) -> str:
    """A few continuations; none where the data is no text."""
    if isinstance(run.config.data, Synthetic):
        return ""
    texts = sample_text(run.program, run.state.params, PROMPTS, Sampling(temperature=0.8))
    rule = "\n" + "-" * 80 + "\n"
    return rule.join(texts) + "\n"


def stop(run: Run, code: Exit) -> Exit:
    """Saves where it stands, whatever checkpoint.every says.  Before the first step there is nothing to save."""
    with run.clock.time("checkpoint"):
        run.checkpoints.wait()
        if run.step not in (0, run.checkpoints.latest()):
            run.save()
            run.checkpoints.wait()
    run.publish(state="preempted", exit_code=int(code))
    run.progress.say(
        f"stopped after step {run.step} of {run.config.train.steps}, saved. The same command goes on from here."
    )
    return code


# --- the run's directory ------------------------------------------------------------------------------------


def changes_since(saves: Checkpointer, config: RunConfig) -> list[str]:
    """What the newest checkpoint was told otherwise, a line each; CheckpointError if it is of another model."""
    newest = saves.latest()
    if newest is None:
        return []
    lines = check_same_run(saves.meta(newest)["config"], config.model_dump(by_alias=True), saves.directory)
    return [f"Changed since step {newest} was saved (then -> now):", *lines] if lines else []


def next_life(directory: Path, before: Status | None, step: int) -> Status:
    status = Status(directory / "status.json", step=step)
    if before:
        status.restarts = before.restarts + 1
        status.compile_seconds = before.compile_seconds
        status.goodput = dict.fromkeys(BUCKETS, 0.0) | before.goodput
    return status


def claim(directory: Path) -> None:
    """Makes sure, before minutes go into compiling, that the run can write there.  Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for place in (directory, directory / "checkpoints"):
            if place.exists():
                with tempfile.TemporaryFile(dir=place):
                    pass
    except OSError as error:
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        raise ConfigError(
            f"run.dir={directory}: cannot be written: {error.strerror}. {there} belongs to {owner(there)} "
            f"({stat.filemode(there.stat().st_mode)}). Choose another run.dir, or have it given to you."
        ) from error


def owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, NotImplementedError):  # a user without a name, a system without users
        return f"user {path.stat().st_uid}"


@contextmanager
def recorded(config: RunConfig, status: Status, clock: Clock) -> Iterator[MetricsLog | None]:
    """The run's files while it lives, written by the first process alone; status.json tells what ended it early."""
    if jax.process_index() > 0:
        yield None
        return
    directory = config.run.directory
    write_atomically(directory / "config.yaml", dump(config))
    status.write()
    with closing(MetricsLog(directory, after=status.step)) as log:
        try:
            yield log
        except BaseException as error:
            clock.book()
            status.write(state="failed", exit_code=exit_code(error))
            raise


def exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return int(error.code)
    return int(Exit.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Exit.CHECK_FAILED)
