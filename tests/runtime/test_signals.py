"""A signal stops a run between two steps, handlers are restored, and a second Ctrl-C stops at once."""

import signal
import threading

import pytest

from spmd_lm.runtime.directories import atomic_directory
from spmd_lm.runtime.signals import STOP_SIGNALS, StopSignals
from tests import processes


@pytest.fixture
def ctrl_c():
    """Python's own handler, which a shell's background job begins without."""
    with processes.handled(signal.SIGINT, signal.default_int_handler):
        yield


@pytest.fixture(autouse=True)
def hangup():
    """The system's own answer, which a process under nohup begins without."""
    with processes.handled(signal.SIGHUP, signal.SIG_DFL):
        yield


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_the_steps_before_the_next_one(number):
    done = []
    with StopSignals() as signals:
        for step in signals.until_received(range(1, 10)):
            done.append(step)
            if step == 3:
                signal.raise_signal(number)
    assert done == [1, 2, 3]
    assert signals.received is number


def test_the_first_signal_is_the_one_remembered():
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert signals.received is signal.SIGTERM


def test_the_answer_to_ctrl_c_says_what_will_happen(capfd):
    """Before the first step there is nothing to save, and after the last one the save is in progress."""
    answers = []
    for when in ("before", "during", "after"):
        with StopSignals() as signals:
            if when == "before":
                signal.raise_signal(signal.SIGINT)
            for _ in signals.until_received([1]):
                if when == "during":
                    signal.raise_signal(signal.SIGINT)
            if when == "after":
                signal.raise_signal(signal.SIGINT)
        answers.append(capfd.readouterr().err.strip())
    assert answers == [
        "Stopping before the next step. Ctrl-C again stops at once.",
        "Stopping after this step and saving. Ctrl-C again stops at once, without saving.",
        "Ending: no more steps. Ctrl-C again stops at once.",
    ]


def test_a_second_interrupt_raises_at_once():
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signals.received is signal.SIGINT


def test_handlers_are_restored_even_after_an_exception():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(ZeroDivisionError), StopSignals():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_block_can_be_entered_again():
    signals = StopSignals()
    for _ in range(2):
        with signals:
            assert signals.received is None


@pytest.mark.parametrize(
    ("number", "stopped"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_a_signal_interrupts_the_filling_of_a_directory_and_removes_it(tmp_path, ctrl_c, number, stopped):
    with pytest.raises(stopped) as told, atomic_directory(tmp_path / "new") as directory:
        (directory / "file").touch()
        signal.raise_signal(number)
    assert getattr(told.value, "code", 128 + number) == 128 + number and not [*tmp_path.iterdir()]


def test_outside_the_main_thread_nothing_is_installed():
    seen = {}

    def work():
        before = [signal.getsignal(number) for number in STOP_SIGNALS]
        with StopSignals() as signals:
            seen.update(same=[signal.getsignal(number) for number in STOP_SIGNALS] == before, received=signals.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == {"same": True, "received": None}
