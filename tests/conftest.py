"""The suite runs on 8 simulated CPU devices; `-m gpu` alone takes the machine's own."""

import gc
import os
import sys
from pathlib import Path

import hypothesis
import pytest

from spmd_lm.runtime.devices import hide_xla_warnings, simulate_devices

DEVICES = 8
CACHE = Path(__file__).parent.parent / ".cache"

# The same examples every time: a failure on one machine is a failure on all.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")
hypothesis.configuration.set_hypothesis_home_dir(CACHE / "hypothesis")


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module, and so jax, is imported.  Processes that tests start inherit all of it."""
    hide_xla_warnings()
    if config.option.markexpr != "gpu":
        # Compiling is most of what the suite does, and what LLVM optimizes is half of it; no collective depends on it.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        simulate_devices(DEVICES)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    gc.set_threshold(50_000)  # tracing allocates much that stays


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="run every N-th of the selected tests, from the K-th on")


@pytest.hookimpl(trylast=True)  # after -m has deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.option.slice:
        start, step = map(int, part.split("/"))
        chosen = sorted(items, key=lambda item: item.nodeid)[start::step]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.fixture(autouse=True)
def narrow():
    """A float64 run switches float64 on for its process, as it should; the next test is another run."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_enable_x64", False)


@pytest.fixture(scope="module", autouse=True)
def keep_what_is_left():
    """Caches that a module leaves, gigabytes in the end, are not searched for garbage again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs here what the API runs in a child, with the test's replacements, and without a second start of jax."""
    monkeypatch.setattr("spmd_lm.api.run_in_child", lambda target, function, *arguments: function(*arguments))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Takes the branch for CUDA of every lax.platform_dependent, and lists them."""
    import jax

    taken = []
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cuda, default: taken.append(cuda) or cuda(*args))
    return taken


@pytest.fixture
def x64():
    """float64, for comparisons to rounding; only in the tests that ask for it."""
    import jax

    with jax.enable_x64(True):
        yield
