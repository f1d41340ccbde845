"""The public functions, as a notebook uses them: in another process, whatever was imported before."""

import subprocess
import sys
from pathlib import Path

import pytest

import spmd_lm
from spmd_lm import api
from spmd_lm.errors import ConfigError

ROOT = Path(__file__).parents[1]
FUNCTIONS = ("load_config", "plan", "audit", "train", "evaluate", "generate", "fill_mask", "report", "read_batch")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, spmd_lm; print(sorted({'jax', 'numpy', 'pydantic', 'matplotlib'} & sys.modules.keys()))"
    assert python(code) == "[]\n"
    assert python(f"import spmd_lm; print(set({FUNCTIONS}) <= set(spmd_lm.__all__), hasattr(spmd_lm, 'tree'))") == (
        "True False\n"
    )


def test_functions_are_imported_when_they_are_used():
    assert spmd_lm.load_config is api.load_config and {*FUNCTIONS} <= {*dir(api)}
    with pytest.raises(AttributeError, match="nothing"):
        spmd_lm.nothing  # noqa: B018


def test_no_module_has_the_name_of_a_public_function():
    """Importing such a submodule would replace the function."""
    names = {path.stem for path in (ROOT / "spmd_lm").iterdir()}
    assert not names & set(FUNCTIONS)


@pytest.mark.slow
def test_every_function_works_after_every_submodule_was_imported(tmp_path):
    code = f"""
import importlib, pkgutil, spmd_lm
for module in pkgutil.walk_packages(spmd_lm.__path__, "spmd_lm."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as missing:
            assert missing.name == "lm_eval", missing  # an extra, whose adapter nothing else imports
small = ("model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "train.steps=2", "train.batch=8")
config = spmd_lm.load_config("configs/debug.yaml", "run.dir={tmp_path}/run", "run.simulate_devices=2", *small)
assert spmd_lm.plan(config)["devices"] == 2 and "mesh" in str(spmd_lm.plan(config))
assert spmd_lm.audit(config)["ok"] and "matches theory" in str(spmd_lm.audit(config, "cpu:2"))
run = spmd_lm.train(config)
assert spmd_lm.evaluate(run)["step"] == 2
assert spmd_lm.generate(run, "def ", tokens=4).startswith("def ")
print("all of it")
"""
    assert python(code).splitlines()[-1] == "all of it"


@pytest.mark.usefixtures("in_this_process")
def test_what_is_compiled_for_absent_devices_is_not_kept(monkeypatch):
    """jax could not read it again, and would warn of that."""
    kept = []

    def stop(config):
        kept.append(config.run.compilation_cache)
        raise ConfigError("stopped before compiling")

    monkeypatch.setattr(api, "set_up_devices", stop)
    monkeypatch.setattr(api, "use_cpu_alone", lambda: None)
    config = api.load_config(ROOT / "configs/debug.yaml")
    for topology in ("cpu:8", "v5p:2x2x2", None):
        with pytest.raises(ConfigError, match="stopped"):
            api.audit(config, topology)
    assert kept == ["auto", "none", "auto"]
