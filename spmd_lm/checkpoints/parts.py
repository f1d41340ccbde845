"""Where the processes of a job save locally: process I of N in DIR/RUN_ID/I-of-N, with a directory for each step."""

from pathlib import Path


def part_directory(local: str, run_id: str, process: int, processes: int) -> Path:
    return _root(local) / run_id / f"{process}-of-{processes}"


def part_directories(local: str, run_id: str | None = None) -> list[Path]:
    """Those that are on this host, of jobs of any size; of all runs, unless one is named."""
    runs = [_root(local) / run_id] if run_id is not None else _root(local).glob("*")
    return sorted(part for run in runs for part in run.glob("*-of-*"))


def num_parts(directory: Path) -> int:
    """The number of processes of the job in which one process saved there; 0 if none did."""
    number = directory.name.rpartition("-of-")[2]
    return int(number) if number.isdecimal() else 0


def parts_of(checkpoint: Path) -> list[Path]:
    """The parts of the same checkpoint, itself included, that are on this host."""
    directory = checkpoint.parent
    return sorted(directory.parent.glob(f"*-of-{num_parts(directory)}/{checkpoint.name}"))


def _root(local: str) -> Path:
    return Path(local).expanduser().absolute()
