"""Programs that stay warm and take turns, one step at a time, so that other load on the machine affects all alike."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class TakesSteps(Protocol):
    def step(self) -> None: ...


class Contender:
    """A warm program that waits for its next step; workload.serve is its other end."""

    def __init__(self, name: str, command: list[str], env: dict[str, str]):
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.losses: list[float] = self._answer()["losses"]
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: stopped with exit code {self.process.wait()}; its error is above.")
        return json.loads(line)

    def ask(self, question: str = "") -> dict[str, Any]:
        """The program's answer; to an empty line, the seconds of one step."""
        assert self.process.stdin is not None
        print(question, file=self.process.stdin, flush=True)
        return self._answer()

    def step(self) -> None:
        seconds = self.ask()
        self.wall.append(seconds["wall"])
        self.cpu.append(seconds["cpu"])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def started(commands: dict[str, list[str]], env: dict[str, str]) -> Iterator[list[Contender]]:
    """Yields warm programs.  They start one after the other, so that none compiles while another steps."""
    with contextlib.ExitStack() as stack:
        contenders = []
        for name, command in commands.items():
            contenders.append(Contender(name, command, env))
            stack.callback(contenders[-1].stop)
        yield contenders


def measure(contenders: Sequence[TakesSteps], rounds: int) -> None:
    for turn in range(rounds):
        for contender in contenders[:: 1 if turn % 2 else -1]:
            contender.step()
