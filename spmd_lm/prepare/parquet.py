"""Rows of a Parquet file, read in a process of their own, which imports nothing of ours and starts in 0.06 s.

A malicious file can make the library use any amount of memory or end the process, so the process has a memory limit,
and its death is an error."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

LEAST_MEMORY = 2**28  # bytes, besides copies of a document
COPIES = 14  # in memory at once, of each document


class ParquetError(Exception):
    pass


def read_rows(file: BinaryIO, key: str, title: str, most: int) -> Iterator[Any]:
    """Yields the names of the columns, then each row's text and title, None if missing, cut if longer than `most`
    bytes.  Raises ParquetError, with the reason, for a damaged file or one that takes too much memory."""
    file.seek(0)
    command = [sys.executable, "-P", __file__, json.dumps([key, title, most])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}  # finds the same library
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=file, stdout=pipe, stderr=null, env=environment) as reader:
        try:
            assert reader.stdout
            while not isinstance(message := json.loads(reader.stdout.readline()), str):
                yield message
        except json.JSONDecodeError:  # it ended within a line, or before the first
            message = f"its reader died, which may take {memory_limit(most):,} bytes of memory"
        finally:
            reader.kill()
    if message:
        raise ParquetError(message)


def memory_limit(most: int) -> int:
    return LEAST_MEMORY + COPIES * most


def send_rows(key: str, title: str, most: int) -> None:
    """Sends the rows of `read_rows`, and finally a text: the reason for stopping early, or ''."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory_limit(most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    reason = ""
    try:
        from arro3.io import read_parquet

        names = None
        for batch in read_parquet(open(0, "rb"), batch_size=1):  # noqa: SIM115 (it ends with this process)
            if names is None:
                names = batch.schema.names
                send(names)
            row = [batch[name].to_pylist()[0] if name in names else None for name in (key, title)]
            send([value[: most + 1] if isinstance(value, str) else None for value in row])
    except BrokenPipeError:  # nobody reads any more
        return
    except BaseException as error:  # arro3's have no common base, and a panic of Rust is not an Exception
        reason = f"{error!s:.100}" or type(error).__name__
    send(reason)


def send(message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    send_rows(*json.loads(sys.argv[1]))
