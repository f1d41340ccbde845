"""What happens between two steps: evaluate, log, save.  A hook is called after every step and acts when due."""

from collections.abc import Callable

from spmd_lm.data.corpus import make_loader
from spmd_lm.evaluation.evaluate import validation_metrics
from spmd_lm.runtime.metrics import Record
from spmd_lm.training.run import TrainingRun

Hook = Callable[[TrainingRun], None]


class Evaluate:
    """Metrics of the validation data, the same batches every time; after the last step too, unless train.eval_every
    is 0."""

    def __init__(self, run: TrainingRun):
        self.every = run.config.train.eval_every
        self.loader = make_loader(run.config, run.corpus, "validation") if self.every else None

    def __call__(self, run: TrainingRun) -> None:
        if self.loader is None or not run.is_due(self.every):
            return
        run.wait()
        with run.clock.time("eval"):
            metrics, _ = validation_metrics(run.program, run.state.params, self.loader)
        run.guard.check_evaluation(run.step, metrics["eval_loss"])
        run.record |= metrics


class Log:
    """Writes the record: a step's metrics and the speed since the last time.  Comes after the hooks that add to it."""

    def __init__(self, run: TrainingRun):
        self.every = run.config.train.log_every
        self.step, self.seconds = run.step, self._training_seconds(run)

    def __call__(self, run: TrainingRun) -> None:
        run.progress.step(run.step)
        if run.is_due(self.every):
            run.wait()
            run.record = {**run.metrics, **self._speed(run), **run.record}
        if not run.record:
            return
        record, run.record = {"step": run.step, **run.record}, {}
        if run.metrics_log is not None:
            run.metrics_log.write(record)
        run.progress.record(record)
        run.write_status()

    def _speed(self, run: TrainingRun) -> Record:
        steps, seconds = run.step - self.step, self._training_seconds(run) - self.seconds
        self.step, self.seconds = run.step, self.seconds + seconds
        step_seconds, program = seconds / steps, run.program
        return {
            "tokens": run.step * program.tokens_per_step,
            "tokens_per_second": program.tokens_per_step / step_seconds,
            "mfu": program.flops_per_step / step_seconds / program.peak_flops if program.peak_flops else None,
            "seconds": step_seconds,
        }

    @staticmethod
    def _training_seconds(run: TrainingRun) -> float:
        """Seconds spent on steps and their data: evaluations and checkpoints do not count against the speed."""
        run.clock.update()
        return run.clock.seconds["step"] + run.clock.seconds["data"]


def save_checkpoint(run: TrainingRun) -> None:
    """Every checkpoint.every steps, and of the last one."""
    if run.is_due(run.config.checkpoint.every):
        run.save()
        run.write_status()
