"""Each private name of jax still is what this package takes it for."""

import ast
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd_lm
from spmd_lm.runtime import compilation_cache, compiler_workarounds, jax_internals
from tests import processes

PACKAGE = Path(spmd_lm.__file__).parent


def test_they_are_named_in_one_module():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            private = [name for name in names if name.startswith(("jax._", "jax.interpreters", "jaxlib"))]
            assert not private or path.name == "jax_internals.py", (path, private)


GLOBAL_STATE = """
import sys
import jax
from spmd_lm.runtime.jax_internals import global_state
jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(sys.argv[1], num_processes=1, process_id=0, cluster_detection_method="deactivate")
assert (global_state.process_id, global_state.num_processes) == (0, 1)
client = global_state.client
client.key_value_set("a/b", "1")
client.key_value_set("a/b", "2", allow_overwrite=True)
assert client.key_value_try_get("a/b") == client.blocking_key_value_get("a/b", 1000) == "2"
assert [tuple(each) for each in client.key_value_dir_get("a")] == [("a/b", "2")]
client.key_value_delete("a")
try:
    client.key_value_try_get("a/b")
except jax.errors.JaxRuntimeError:
    print("deleted")
assert global_state.preemption_sync_manager is None
jax.config.update("jax_enable_preemption_service", True)
for _ in range(2):
    global_state.initialize_preemption_sync_manager()
    assert not global_state.preemption_sync_manager.reached_sync_point(1)
    global_state.preemption_sync_manager.shutdown()
    global_state.preemption_sync_manager = None
"""


def test_global_state_is_this_process_in_its_job():
    code = [sys.executable, "-c", GLOBAL_STATE, f"127.0.0.1:{processes.free_port()}"]
    process = processes.start_command(code, JAX_PLATFORMS="cpu")
    output, _ = processes.communicate(process)
    assert process.returncode == 0 and "deleted" in output, output


def test_a_cluster_type_knows_the_number_of_this_process(monkeypatch):
    for name in ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "3")
    present = [each for each in jax_internals.cluster_types if each.is_env_present()]
    assert [each.get_process_id() for each in present if "slurm" in each.__name__.lower()] == [3]
    assert any("tpu" in each.__name__.lower() for each in jax_internals.cluster_types)


def test_the_compilation_cache_is_asked_for_every_program(monkeypatch):
    entries: dict[str, bytes] = {}

    class Cache(compilation_cache.VerifiedCache):
        def get(self, key):
            return entries.get(key)

        def put(self, key, value):
            entries[key] = value

    before, directory = jax_internals.compilation_cache.get_file_cache, jax.config.jax_compilation_cache_dir
    cached = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}
    former = {name: getattr(jax.config, name) for name in cached}
    try:
        for name, value in cached.items():
            jax.config.update(name, value)
        compilation_cache.install(Cache(Path("/nowhere")))
        jax.jit(lambda x: jnp.sin(x) * 12345)(np.float32(1))
        assert entries
    finally:
        compilation_cache.uninstall()
        for name, value in (former | {"jax_compilation_cache_dir": directory}).items():
            jax.config.update(name, value)
    assert jax_internals.compilation_cache.get_file_cache is before


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "pmax", "ppermute", "psum", "reduce_scatter"])
def test_collectives_have_lowering_rules(name):
    """tests/runtime/test_channels.py has them replaced."""
    (entry,) = [entry for each, entry in jax_internals.lowerings.items() if each.name == name]
    assert name in compiler_workarounds.COLLECTIVES and callable(entry.rule)
