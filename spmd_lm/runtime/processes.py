"""The processes of one job: they connect, and continue only if all of them run the same program.

jax.distributed would find most launchers itself, but under SLURM and Open MPI it gives each process one GPU, even one
that has a host of eight to itself, and process 0 listens on every network of its host."""

import atexit
import contextlib
import glob
import itertools
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import spmd_lm
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.runtime.coordinator import CONNECT_SECONDS, connecting, require_free_port, wait_for_coordinator
from spmd_lm.runtime.formatting import parse_count
from spmd_lm.runtime.gpus import share, visible_gpus
from spmd_lm.runtime.launchers import (
    ADDRESS,
    LOCALHOST,
    NUM_PROCESSES,
    PROCESS_ID,
    ProcessInfo,
    detect_process,
    join_address,
    split_address,
)
from spmd_lm.runtime.outputs import flush_streams, print_line

HEARTBEAT_SECONDS = 15  # a process silent for longer is dead, and ends the others
WAIT_MS = 600_000  # for a process that still reads its data
MOST_DIFFERENCES = 5  # named in one line
FAILED = "spmd_lm/failed"  # key of the first process to fail
POLL_SECONDS = 1  # between polls of the coordinator for it
agreements = itertools.count()  # numbers exchanges: keys are written once, and a process may train twice
LEAVE_SECONDS = 15  # for a process that leaves to say why
TELL_SECONDS = 2  # for the coordinator to answer a process that leaves
leaving = threading.Event()  # set when this process ends
aborted = threading.Event()  # set when jax aborts it: calls to the coordinator then never return
# Words in messages of collectives that fail because a process is gone.
LOST_PEER = ("Gloo", "NCCL", "UNAVAILABLE", "Connection closed", "Connection reset", "unhealthy")

PEER_IS_GONE = "another process of the job is gone: see its output."

handlers: list[Any] = []  # keeps C signal handlers alive
PARENT = "SPMD_LM_PARENT"
PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


def end_with_parent() -> None:
    """Makes Linux send SIGTERM to this process when its parent, whose pid is in SPMD_LM_PARENT, ends, even if killed.
    Ends at once if it already has.  Other systems lack this.  Linux watches the thread that started this process, which
    should be the main one."""
    parent = os.environ.pop(PARENT, None)  # not for the processes that this one starts
    if parent is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if str(os.getppid()) != parent:
        sys.exit(128 + signal.SIGTERM)


def join(process: ProcessInfo | None) -> None:
    """Connects this process to the job's others, if any, once.  Raises ConfigError if it cannot."""
    if in_a_job() or (process is None and not in_tpu_slice(os.environ)):
        return
    import jax

    # On a TPU's workers jax asks the metadata server, or reads what GKE sets.
    options = _connection(process) if process else {}
    if process:
        (wait_for_coordinator if process.process_id else require_free_port)(options["coordinator_address"])
    jax.config.update("jax_enable_preemption_service", False)  # until training starts it: SIGTERM ends other verbs
    # So long that `connecting` ends the process before jax aborts it.
    timeouts: dict[str, Any] = {
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
        "initialization_timeout": 2 * CONNECT_SECONDS,
    }
    try:
        with connecting(options["coordinator_address"] if process and process.process_id else None):
            jax.distributed.initialize(**options, **timeouts)
    except (ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        where = f"{ADDRESS}={options['coordinator_address']}" if options else "Cloud TPU"
        raise ConfigError(
            f"{where}: the processes cannot connect: {reason}. "
            f"Set {ADDRESS} to host:port of the first process, with {NUM_PROCESSES} and {PROCESS_ID}."
        ) from error
    exit_on_abort()
    watcher = threading.Thread(target=end_with_job, daemon=True)
    watcher.start()
    atexit.register(watcher.join)  # before Python ends: the thread must not be in the client then
    atexit.register(leaving.set)
    if process:
        use_own_gpus(process.process_id)


def exit_on_abort() -> None:
    """Makes SIGABRT end this process with exit code 8: jax aborts, in C++, if the coordinator is gone or a peer sends
    no heartbeats.  A Python handler would wait for the main thread, which waits for the peer."""
    import ctypes

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def on_abort(_: int) -> None:
        aborted.set()
        if leaving.is_set():  # another thread knows the reason, and is about to print it
            time.sleep(LEAVE_SECONDS)
        os.write(2, b"error: another process of the job is gone, or this one was aborted: see what stands above.\n")
        os._exit(Exit.PEER_LOST)

    handlers.append(on_abort)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(on_abort, ctypes.c_void_p))


def is_peer_failure(error: BaseException) -> bool:
    """True if a collective or a call to the coordinator failed because another process seems to be gone."""
    import jax

    if isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in LOST_PEER):
        return True
    return error.__cause__ is not None and is_peer_failure(error.__cause__)


def publish(name: str, text: str) -> None:
    """Publishes this process's latest text under `name` to the job."""
    from spmd_lm.runtime.jax_internals import global_state

    key = f"spmd_lm/{name}/{global_state.process_id}"
    global_state.client.key_value_set(key, text, allow_overwrite=True)


def published(name: str) -> dict[int, str]:
    """The latest text of each process under `name`."""
    from spmd_lm.runtime.jax_internals import global_state

    found = global_state.client.key_value_dir_get(f"spmd_lm/{name}")
    return {int(key.rpartition("/")[2]): text for key, text in found}


def _connection(process: ProcessInfo) -> dict[str, Any]:
    """Arguments of jax.distributed.initialize.  A job on one host accepts no outside connections."""
    host, port = split_address(process.coordinator_address or "")
    address = join_address(LOCALHOST if process.on_one_host else host, port)
    return {
        "coordinator_address": address,
        "coordinator_bind_address": address if process.on_one_host else None,
        "num_processes": process.num_processes,
        "process_id": process.process_id,
        "cluster_detection_method": "deactivate",
    }


def use_own_gpus(process_id: int) -> None:
    """Restricts this process, before jax starts, to its share of the GPUs seen by several.  Raises ConfigError in all
    processes if they cannot be shared."""
    import jax

    if (own := jax.config.values["jax_cuda_visible_devices"]) != "all":
        raise ConfigError(
            f"JAX_CUDA_VISIBLE_DEVICES={own}: a host's GPUs are shared among its processes as CUDA shows "
            "them. Use CUDA_VISIBLE_DEVICES."
        )
    seen = allgather_objects("GPUs", [] if jax.config.values["jax_platforms"] == "cpu" else visible_gpus())
    try:
        own = share(seen)[process_id]
    except ConfigError:
        jax.distributed.shutdown()  # waits for the others, which raise this too
        raise
    if own != [*range(len(seen[process_id]))]:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, own)))


def in_tpu_slice(environment: Mapping[str, str]) -> bool:
    """True on a worker of a Cloud TPU, of one host or many; a notebook's TPU has no job."""
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    if (slices := parse_count(text := environment.get("MEGASCALE_NUM_SLICES", "1"))) is None:
        raise ConfigError(f"MEGASCALE_NUM_SLICES={text:.40}: expected the number of TPU slices. Unset it elsewhere.")
    if "," in hosts or slices > 1:
        return True
    if hosts or environment.keys() & {"TPU_SKIP_MDS_QUERY", "COLAB_RELEASE_TAG"}:
        return False
    return has_tpu()


def has_tpu() -> bool:
    vendors = (Path(path).read_text().strip() for path in glob.glob("/sys/bus/pci/devices/*/vendor"))
    return "0x1ae0" in vendors  # Google's


def is_first_process() -> bool:
    """True if this process writes on behalf of its job; known without joining it."""
    if process := detect_process(os.environ):
        return process.process_id == 0
    if not in_tpu_slice(os.environ):
        return True
    from spmd_lm.runtime.jax_internals import cluster_types

    return next((env.get_process_id() == 0 for env in cluster_types if env.is_env_present()), True)


def allgather_objects(subject: str, own: Any) -> list[Any]:
    """Gathers each process's JSON value on `subject`, in order of processes; a collective call.  Uses the coordinator's
    key-value store, which needs no device; the first process gathers."""
    from spmd_lm.runtime.jax_internals import global_state

    client, number, count = global_state.client, next(agreements), global_state.num_processes
    if client is None or count == 1:
        return [own]
    key = f"spmd_lm/{number}/{subject}"
    client.key_value_set(f"{key}/{global_state.process_id}", json.dumps(own))
    if global_state.process_id == 0:
        answers = [json.loads(client.blocking_key_value_get(f"{key}/{i}", WAIT_MS)) for i in range(count)]
        client.key_value_set(f"{key}/all", json.dumps(answers))
        client.key_value_delete(f"spmd_lm/{number - 1}")  # the previous exchange, which all have read
    return json.loads(client.blocking_key_value_get(f"{key}/all", WAIT_MS))


def require_single_process(verb: str) -> None:
    """Raises ConfigError in a job: a checkpoint of another model is written by a single process."""
    import jax

    if jax.process_count() > 1:
        raise ConfigError(
            f"spmd-lm {verb} runs in one process; its checkpoint works with any number. Unset JAX_COORDINATOR_ADDRESS; "
            f"--devices N simulates the devices of a layout."
        )


def assert_equal(subject: str, facts: Mapping[str, Any]) -> None:
    """Raises ConfigError in every process, naming the differences, unless all call this with equal facts about
    `subject`."""
    own = {"host": socket.gethostname(), "facts": {name: str(value) for name, value in facts.items()}}
    if found := differences(subject, allgather_objects(subject, own)):
        import jax

        jax.distributed.shutdown()  # waits for the others: the first may not leave before all have read it
        raise ConfigError(*found)


def differences(subject: str, answers: list[dict[str, Any]]) -> list[str]:
    """A line for each process whose facts differ from process 0's."""
    first, *others = answers
    lines = []
    for process, other in enumerate(others, 1):
        names = sorted(first["facts"].keys() | other["facts"].keys())
        both = {name: (other["facts"].get(name), first["facts"].get(name)) for name in names}
        unequal = [f"{name}={here}, not {there}" for name, (here, there) in both.items() if here != there]
        if unequal:
            more = f" and {len(unequal) - MOST_DIFFERENCES} more" if len(unequal) > MOST_DIFFERENCES else ""
            what = "; ".join(unequal[:MOST_DIFFERENCES])
            lines.append(
                f"process {process} on {other['host']} and process 0 on {first['host']} differ in their {subject}: "
                f"{what}{more}. Start all of a job's processes with the same code, configuration and files."
            )
    return lines


def versions() -> dict[str, str]:
    """Versions that must agree for processes to compile the same program."""
    packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")}
    return {"python": platform.python_version(), "spmd_lm": spmd_lm.__version__} | packages


def start_preemption_service() -> None:
    """Lets jax handle SIGTERM, in place of any handler; reached_preemption_sync_point then informs all processes of the
    job, which must all call this."""
    import jax

    from spmd_lm.runtime.jax_internals import global_state

    if global_state.preemption_sync_manager is not None:  # an earlier run's, which has released SIGTERM
        global_state.preemption_sync_manager.shutdown()
        global_state.preemption_sync_manager = None
    jax.config.update("jax_enable_preemption_service", True)
    global_state.initialize_preemption_sync_manager()


def in_a_job() -> bool:
    distributed = getattr(sys.modules.get("jax"), "distributed", None)  # a signal may come while jax is imported
    return distributed is not None and distributed.is_initialized()


def end_with_job() -> None:
    """Ends this process with a failed peer's exit code, instead of waiting in a collective until heartbeats stop."""
    import jax

    from spmd_lm.runtime.jax_internals import global_state

    client = global_state.client
    while not leaving.wait(POLL_SECONDS):
        try:
            failure = json.loads(client.key_value_try_get(FAILED))
        except jax.errors.JaxRuntimeError:  # none has failed
            continue
        which = f"process {failure['process']} on {failure['host']}"
        print_line(f"error: {which} failed with exit code {failure['code']}: see its output.", sys.stderr)
        _exit(failure["code"])


def leave_job(code: int) -> int:
    """Returns the exit code of a failed process, outside a job.  In a job, ends this process and the others: at exit
    jax would wait for them, and they for this one."""
    if in_a_job():
        import jax

        from spmd_lm.runtime.jax_internals import global_state

        leaving.set()
        client = global_state.client
        failure = {"process": global_state.process_id, "host": socket.gethostname(), "code": code}

        def tell() -> None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was first, or the coordinator has ended
                client.key_value_set(FAILED, json.dumps(failure))

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        thread.join(TELL_SECONDS)  # the coordinator may have been stopped
        _exit(code)
    return code


def _exit(code: int) -> NoReturn:
    from spmd_lm.runtime.jax_internals import global_state

    flush_streams()
    if global_state.process_id == 0:
        time.sleep(2 * POLL_SECONDS)  # the coordinator is here, and the others still poll it
    os._exit(code)
