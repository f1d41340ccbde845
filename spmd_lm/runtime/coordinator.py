"""Checks of a job's coordinator, in its first process: its port is free, it listens, and it answers.

jax would notice failures too, but abort."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

from spmd_lm.errors import ConfigError, Exit
from spmd_lm.runtime.launchers import ADDRESS, LOCALHOST, split_address
from spmd_lm.runtime.outputs import flush_streams, print_line

CONNECT_SECONDS = 300  # for all processes to start, and for the first one's host name to resolve
SILENT_SECONDS = 25  # for the first process to answer, once something listens at its address
RETRY_SECONDS = 1.0
# HTTP/2, with which gRPC begins: a client's first bytes, and the type of the frame with which a server answers.
PREFACE, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), 4


def require_free_port(address: str) -> None:
    """Raises ConfigError if this process cannot listen at host:port, where jax would crash.  Unless the job is on one
    host, the coordinator listens on every network, IPv6 and IPv4."""
    host, port = split_address(address)
    both = host != LOCALHOST and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server((host if host == LOCALHOST else "", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"{ADDRESS}={address}: cannot listen there: {reason}. Choose another port.") from error


def wait_for_coordinator(address: str) -> None:
    """Waits until something listens at host:port.  Raises ConfigError if nothing does, where jax would abort."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection(split_address(address), timeout=10).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{ADDRESS}={address}: the first process does not answer: {error.strerror or error}. "
                    "See its output, and whether this host can reach that one."
                ) from error
        time.sleep(0.2)


@contextlib.contextmanager
def connecting(coordinator: str | None) -> Iterator[None]:
    """Watches jax connect to the coordinator at host:port (None: this process).  If that falls silent, or not all
    processes connect in CONNECT_SECONDS, ends this process with a line and exit code 8; jax aborts, with a stack."""
    connected = threading.Event()

    def watch() -> None:
        started = answered = time.monotonic()
        while not connected.wait(RETRY_SECONDS):
            if coordinator is None or answers(coordinator):
                answered = time.monotonic()
            problem = None
            if time.monotonic() - answered > SILENT_SECONDS:
                problem = f"{ADDRESS}={coordinator}: what listens there does not answer as the first process would. "
                problem += "See whether that one was stopped, or choose a port that no other program has."
            elif time.monotonic() - started > CONNECT_SECONDS:
                problem = f"not all processes of the job have connected in {CONNECT_SECONDS} s. See their output."
            if problem and not connected.is_set():
                print_line(f"error: {problem}", sys.stderr)
                flush_streams()
                os._exit(Exit.PEER_LOST)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        connected.set()


def answers(address: str) -> bool:
    """True if a responsive gRPC server listens at host:port."""
    try:
        with socket.create_connection(split_address(address), timeout=5) as connection:
            connection.sendall(PREFACE)
            return connection.recv(9, socket.MSG_WAITALL)[3:4] == bytes([SETTINGS])
    except OSError:
        return False
