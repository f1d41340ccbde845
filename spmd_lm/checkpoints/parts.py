"""The directories of local checkpoints: DIR/RUN_ID/I-of-N/STEP for process I of N."""

from pathlib import Path


def part_directory(local: str, run_id: str, process: int, processes: int) -> Path:
    return _root(local) / run_id / f"{process}-of-{processes}"


def part_directories(local: str, run_id: str | None = None) -> list[Path]:
    """The parts on this host, of jobs of any size; of all runs unless one is given."""
    runs = [_root(local) / run_id] if run_id is not None else _root(local).glob("*")
    return sorted(part for run in runs for part in run.glob("*-of-*"))


def num_parts(directory: Path) -> int:
    """The number of processes of the job that saved there; 0 for any other directory."""
    number = directory.name.rpartition("-of-")[2]
    return int(number) if number.isdecimal() else 0


def parts_of(checkpoint: Path) -> list[Path]:
    """The parts of one checkpoint that are on this host, itself included."""
    directory = checkpoint.parent
    return sorted(directory.parent.glob(f"*-of-{num_parts(directory)}/{checkpoint.name}"))


def _root(local: str) -> Path:
    return Path(local).expanduser().absolute()
