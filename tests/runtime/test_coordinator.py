"""The coordinator's port: taken, silent, of another program; and processes that never come."""

import re
import socket
import subprocess
import sys
import threading

import pytest

from spmd_lm.errors import ConfigError, Exit
from spmd_lm.runtime.coordinator import answers, require_free_port, wait_for_coordinator
from tests import processes


@pytest.mark.parametrize(
    ("host", "reason"), [("nowhere.invalid", "[Nn]ame"), ("127.0.0.1", "Connection refused"), ("[::1]", "")]
)
def test_a_first_process_that_does_not_answer_is_reported(monkeypatch, host, reason):
    monkeypatch.setattr("spmd_lm.runtime.coordinator.CONNECT_SECONDS", 0)
    with pytest.raises(ConfigError, match=f"the first process does not answer: .*{reason}"):
        wait_for_coordinator(f"{host}:{processes.free_port()}")


def test_a_port_that_is_taken_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}: cannot listen there: Address already in use. Choose"):
            require_free_port(f"127.0.0.1:{port}")
    require_free_port(f"127.0.0.1:{port}")


@pytest.mark.parametrize("where", ["0.0.0.0", "127.0.0.1", "::", "::1", "only ::"])
def test_a_port_that_is_taken_on_any_network_is_reported(where):
    """A job on several hosts listens on all of them."""
    address = where.removeprefix("only ")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        taken = socket.create_server((address, 0), family=family, dualstack_ipv6=where == "::")
    except OSError:
        pytest.skip("no IPv6 here")
    with taken:
        port = taken.getsockname()[1]
        for host in ("n004", "10.0.0.4", "[fd00::1]"):
            with pytest.raises(ConfigError, match="cannot listen there: Address already in use"):
                require_free_port(f"{host}:{port}")
    require_free_port(f"n004:{port}")


def test_a_first_process_that_starts_later_is_waited_for():
    port = processes.free_port()
    code = f"import socket, time; time.sleep(0.5); socket.create_server(('127.0.0.1', {port})).accept()"
    with subprocess.Popen([sys.executable, "-c", code]) as first:
        wait_for_coordinator(f"127.0.0.1:{port}")
    assert first.returncode == 0


# A process of a job of two, with less patience.
JOIN = """
import sys
from spmd_lm.runtime import coordinator, processes
from spmd_lm.runtime.launchers import ProcessInfo
coordinator.SILENT_SECONDS, coordinator.CONNECT_SECONDS, coordinator.RETRY_SECONDS = 1, 3, 0.2
processes.join(ProcessInfo(2, int(sys.argv[1]), f"127.0.0.1:{sys.argv[2]}", 2))
"""
ANSWERS = {"silent": b"", "ssh": b"SSH-2.0-OpenSSH_9.2\r\n", "http": b"HTTP/1.1 400 Bad Request\r\n\r\n", "gone": None}


def accept(server: socket.socket, answer: bytes | None) -> None:
    """Accepts until the server closes; None closes each connection at once."""
    connections = []
    while True:
        try:
            connections.append(server.accept()[0])
        except OSError:
            return
        if answer is None:
            connections.pop().close()
        else:
            connections[-1].sendall(answer)


@pytest.mark.slow
def test_a_process_that_cannot_connect_ends_with_a_line(tmp_path):
    """The coordinators: one that accepts and stays silent, other programs, and a process 0 whose peer never comes."""
    servers = {name: socket.create_server(("127.0.0.1", 0)) for name in ANSWERS}
    for name, server in servers.items():
        threading.Thread(target=accept, args=(server, ANSWERS[name]), daemon=True).start()
    started = {
        name: processes.start_command([sys.executable, "-c", JOIN, "1", str(server.getsockname()[1])])
        for name, server in servers.items()
    }
    started["alone"] = processes.start_command([sys.executable, "-c", JOIN, "0", str(processes.free_port())])
    for name, process in started.items():
        output, _ = processes.communicate(process)
        why = "not all processes of the job have connected" if name == "alone" else "does not answer as the first"
        assert process.returncode == Exit.PEER_LOST and re.match(rf"error: .*{why}.*\n$", output), (name, output)
    for server in servers.values():
        server.close()


def test_a_coordinator_answers():
    """jax's own does, until it is gone."""
    from jax._src.lib import _jax

    address = f"127.0.0.1:{processes.free_port()}"
    assert not answers(address)
    service = _jax.get_distributed_runtime_service(address, 1)
    assert answers(address)
    service.shutdown()
