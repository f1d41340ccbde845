"""Training, from a config to an exit code.

Step k + 1 follows from the state after step k and the config alone, so that a run may stop anywhere and go on from its
newest checkpoint as if it had not."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from spmd_lm.checkpoints.checkpointer import Checkpointer, Meta, check_same_run
from spmd_lm.config.load import CONFIG, TOKENIZER, dump, kept_vocabulary
from spmd_lm.config.load import load as load_config
from spmd_lm.config.schema import Data, RunConfig, Synthetic
from spmd_lm.data.batch_source import BatchSource
from spmd_lm.data.corpus import Corpus, load_data
from spmd_lm.data.loader import make_train_loader, make_validation_loader
from spmd_lm.data.tasks.dataset import Labelled
from spmd_lm.data.tokenizers.vocabulary import copy_vocabulary
from spmd_lm.errors import CheckpointError, ConfigError, Exit, UserError
from spmd_lm.generation.generator import sample_text
from spmd_lm.generation.sampling import Sampling
from spmd_lm.planning import plan_report as plans
from spmd_lm.runtime.lock import claimed
from spmd_lm.runtime.metrics import BUCKETS, Clock, MetricsLog, Status, plot_loss, read_records, write_atomically
from spmd_lm.runtime.progress import Progress, describe, duration
from spmd_lm.runtime.signals import StopSignals
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from spmd_lm.training.hooks import Evaluate, Log, Run, Save
from spmd_lm.training.init_from import Origin, check_vocabulary

Hook = Callable[[Run], None]

STOPPED = {signal.SIGTERM: Exit.PREEMPTED, signal.SIGINT: Exit.INTERRUPTED}

PROMPTS = ["", "The ", "def "]  # of samples.txt


def train(config: RunConfig, signals: StopSignals | None = None) -> Exit:
    """Trains the run in run.dir up to train.steps, from its newest checkpoint if it has one.

    signals: those that the caller watches already; none: watched from here on.
    Raises ConfigError for a layout that is impossible or a directory that cannot be written or is in use,
    CheckpointError for a run of another model or checkpoints damaged or not saved, DataError, and NonFiniteError; none
    harms what was saved before.
    """
    directory = config.run.directory
    check_places(directory)
    progress = Progress(config.train.steps, quiet=jax.process_index() > 0)
    saves = Checkpointer(directory / "checkpoints", config.checkpoint.keep, config.checkpoint.asynchronous)
    watched: AbstractContextManager[StopSignals] = nullcontext(signals) if signals else StopSignals()
    with watched as signals, claimed(directory, progress.say), closing(saves), interrupt_told(progress, saves):
        past = read_past(directory, saves)
        check_files(config, past)
        check_vocabulary(config, directory, past.meta["config"] if past.meta and past.saved else None)
        notices = check_model(config, past)
        if past.done and past.done >= config.train.steps:
            for line in (*notices, f"{directory} has its {past.done} steps: nothing to do. {way_on(past)}"):
                progress.say(line)
            return Exit.DONE
        check_position(config, past)

        status = next_life(directory, past)
        clock = Clock(status.goodput)
        with clock.time("init"):
            program = Program(config)
            progress.say(plans.summary(plans.describe(config, program.plan)))
        with failure_told(status, clock):
            with clock.time("init"):
                origin = origin_of(program, past)
                corpus = load_data(config.data, config.train.seed, config.model.vocab)
                loader = make_train_loader(config, corpus)
                if config.train.eval_every:
                    # refuses too little text before there are files to leave behind
                    make_validation_loader(config, corpus)
                for line in (corpus.describe(), *notices):
                    progress.say(line)
                state = first_state(program, saves, past.saved, origin, corpus, progress)
            with open_files(config, past, status, progress) as log:
                run = Run(config, program, corpus, saves, status, clock, log, progress, state, status.step)
                return carry_out(run, loader, signals)


def carry_out(run: Run, loader: BatchSource, signals: StopSignals) -> Exit:
    """Compiles, takes the steps, and ends in good order."""
    hooks: list[Hook] = [Evaluate(run), Log(run), Save(run)]
    if signals.received is None:  # a compile may outlast the grace that a preempted job is given
        with run.progress.compiling(usually=run.status.compile_seconds), run.clock.time("compile"):
            run.status.compile_seconds = run.program.compile()
        run.publish()
    take_steps(run, loader, hooks, signals)
    if run.step >= run.config.train.steps:
        return finish(run)
    assert signals.received is not None
    return stop(run, STOPPED[signals.received])


def first_state(
    program: Program,
    saves: Checkpointer,
    saved: int | None,
    origin: Origin | None,
    corpus: Corpus | Labelled,
    progress: Progress,
) -> TrainState:
    """The saved state of a step, or the initial one, on devices."""
    if saved is None:
        progress.say(f"{origin.describe(program) if origin else 'starting'}; {progress.steps} steps to go")
        return origin.state(program) if origin else program.init()
    progress.say(f"resuming after step {saved} of {progress.steps}")
    canonical, meta = saves.restore(saved, program.abstract_canonical())
    if meta["data"]["samples"] and meta["data"]["fingerprint"] != corpus.fingerprint:
        progress.say("The text is not the one that this run was trained on so far: other batches from here on.")
    return program.place(canonical)


def take_steps(run: Run, loader: BatchSource, hooks: list[Hook], signals: StopSignals) -> None:
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
        records = read_records(run.log.path)
        plot_loss(records, run.directory / "loss.png", f"{run.config.run.name}: {run.corpus.name}")
        if texts:
            write_atomically(run.directory / "samples.txt", texts)
        last = describe(records[-1]) if records else ""
        run.progress.say(f"done: step {run.step}{last}  in {time_taken(run)}")
    if (saved := run.checkpoints.latest()) != run.step:
        nothing = "Nothing was saved" if saved is None else f"Nothing was saved since step {saved}"
        run.progress.say(f"{nothing} (checkpoint.every=0): set it, to evaluate, generate or go on from the end.")
    run.publish(state="done", exit_code=int(Exit.DONE))
    return Exit.DONE


def time_taken(run: Run) -> str:
    """`29s`; after a resume `29s, 3m07s over 3 lives`."""
    lives = run.status.restarts + 1
    return duration(run.clock.this_life()) + (
        f", {duration(run.clock.total())} over {lives} lives" if lives > 1 else ""
    )


def sample(run: Run) -> str:
    """A few continuations; none where the data is no text, or the model writes none."""
    if isinstance(run.config.data, Synthetic) or not run.config.model.causal:
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
    if run.step == 0:
        run.progress.say("stopped before the first step: nothing was done, so nothing was saved. Start it again.")
    else:
        here = f"stopped after step {run.step} of {run.config.train.steps}, saved"
        run.progress.say(f"{here}. The same command goes on from here.")
    return code


# --- what a run was before ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Past:
    """What a directory tells of a run's lives before; all None where there was none."""

    status: Status | None
    saved: int | None  # the step of the newest checkpoint
    meta: Meta | None  # what stands beside it

    @property
    def done(self) -> int | None:
        """The steps of a run that is finished."""
        return self.status.step if self.status and self.status.state == "done" else None


def read_past(directory: Path, saves: Checkpointer) -> Past:
    """To be read under the lock, once: what follows must not change in between."""
    status, saved = Status.read(directory), saves.latest()
    return Past(status, saved, None if saved is None else saves.meta(saved))


def origin_of(program: Program, past: Past) -> Origin | None:
    """The run that this one starts as, if it has not started yet."""
    said = program.config.run.init_from
    return Origin.of(program, Path(said).expanduser()) if said and past.saved is None else None


def way_on(past: Past) -> str:
    """How a finished run is trained further."""
    if past.saved is None:
        return "It kept no checkpoint: to go on, train in another run.dir, with checkpoint.every set."
    return f"Raise train.steps to go on{'' if past.saved == past.done else f', from step {past.saved}'}."


def check_places(directory: Path) -> None:
    """Raises ConfigError for a directory where a run keeps a file, or the other way round."""
    files, folders = (CONFIG, "loss.png", "samples.txt", ".lock"), ("tensorboard", "checkpoints")
    wrong = [f"{name} is a directory, and a run keeps a file" for name in files if os.path.isdir(directory / name)]
    wrong += [f"{name} is a file, and a run keeps a directory" for name in folders if os.path.isfile(directory / name)]
    if wrong:
        raise ConfigError(*(f"run.dir={directory}: {what} there. Move it away, or choose another." for what in wrong))


def check_files(config: RunConfig, past: Past) -> None:
    """Raises ConfigError where a run would write over what is not its own."""
    if past.status is not None or past.saved is not None:
        return
    directory = config.run.directory
    for name, harmless in ((CONFIG, dump(config)), ("metrics.jsonl", "")):
        path = directory / name
        if path.is_file() and path.read_bytes() != harmless.encode():
            raise ConfigError(
                f"run.dir={directory}: training would write over {name}, which is of no run: there is neither a "
                f"status.json nor a checkpoint beside it. Move it out of there, or choose another run.dir."
            )


def check_model(config: RunConfig, past: Past) -> list[str]:
    """What is otherwise than in the run's life before, for its reader; CheckpointError if that was another model's."""
    if past.meta is not None:
        saved, since = past.meta["config"], f"since step {past.saved} was saved"
        notices = []
    elif past.status is not None:
        saved, since = saved_config(config.run.directory), "since then"
        notices = [f"{config.run.directory} was begun before, but saved no checkpoint: starting again from step 0."]
    else:
        return []
    if past.saved is not None and config.run.init_from not in (None, saved["run"].get("init_from")):
        notices.append(f"run.init_from={config.run.init_from} is for a run that has no step yet: this one goes on.")
    lines = check_same_run(saved, config.model_dump(by_alias=True), config.run.directory)
    return [*notices, f"Changed {since} (then -> now):", *lines] if lines else notices


def saved_config(directory: Path) -> dict[str, Any]:
    """The run's config.yaml: without a checkpoint, the only word on its model."""
    try:
        return load_config(directory / CONFIG).model_dump(by_alias=True)
    except ConfigError as error:
        raise CheckpointError(
            f"{directory} has a run without a checkpoint, of which the config.yaml does not say the model:\n{error}\n"
            f"Mend that file, choose another run.dir, or delete this one."
        ) from error


def check_position(config: RunConfig, past: Past) -> None:
    """Raises CheckpointError where training cannot go on: no state to go on from, or no such place in the data."""
    directory, batch = config.run.directory, config.train.batch
    if past.saved is None or past.meta is None:
        if past.done is not None:
            raise CheckpointError(
                f"{directory} finished its {past.done} steps and kept no checkpoint (checkpoint.every=0), nothing to "
                f"go on from. Choose another run.dir, or delete this one."
            )
        return
    if past.saved == 0:  # imported: no batch was taken yet
        return
    then = past.meta["data"]["samples"] // past.saved
    if then != batch:
        raise CheckpointError(
            f"{directory} was trained on batches of train.batch={then}, not {batch}: the position in the data is "
            f"counted in batches, and another batch would skip or repeat text. Put train.batch={then} back, or choose "
            f"another run.dir."
        )


# --- the run's directory ------------------------------------------------------------------------------------


def next_life(directory: Path, past: Past) -> Status:
    status = Status(directory / "status.json", step=past.saved or 0)
    if before := past.status:
        status.restarts = before.restarts + 1
        status.compile_seconds = before.compile_seconds
        status.goodput = dict.fromkeys(BUCKETS, 0.0) | before.goodput
    return status


def keep_vocabulary(config: RunConfig) -> None:
    """A run has its vocabulary with it, wherever it is moved."""
    directory = config.run.directory
    if isinstance(config.data, Data) and config.data.tokenizer != "bytes" and not kept_vocabulary(directory):
        try:
            copy_vocabulary(config.data.tokenizer, directory / TOKENIZER)
        except OSError as error:
            where = error.filename or directory
            raise ConfigError(f"{where}: {error.strerror}. Make room, or choose another run.dir.") from error


def open_files(
    config: RunConfig, past: Past, status: Status, progress: Progress
) -> AbstractContextManager[MetricsLog | None]:
    """The files of a run that has its first state, written by the first process alone."""
    if jax.process_index() > 0:
        return nullcontext()
    directory = config.run.directory
    keep_vocabulary(config)
    log = MetricsLog(directory, after=status.step)  # first: it may refuse what it finds
    if past.meta and (gap := log.missing(past.meta["config"]["train"]["log_every"])):
        progress.say(f"{log.path} lacks the records of steps {gap[0]} to {gap[1]}, which were taken before.")
    write_atomically(directory / CONFIG, dump(config))
    status.write()
    return closing(log)


@contextmanager
def failure_told(status: Status, clock: Clock) -> Iterator[None]:
    """What ends a run early is told by its status.json, if it has one yet."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # a full disk must not hide the error that we came with
            if jax.process_index() == 0 and status.path.exists():
                clock.book()
                status.write(state="failed", exit_code=exit_code(error))
        raise


@contextmanager
def interrupt_told(progress: Progress, saves: Checkpointer) -> Iterator[None]:
    """Who stops a run at once, by a second Ctrl-C, is told what is left of it."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(CheckpointError):
            saves.wait()
        saved = saves.latest()
        if saved is None:
            progress.say("stopped at once: nothing was saved.")
        else:
            progress.say(f"stopped at once: nothing since step {saved} was saved. The same command goes on from there.")
        raise


def exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return int(error.code)
    return int(Exit.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Exit.CHECK_FAILED)
