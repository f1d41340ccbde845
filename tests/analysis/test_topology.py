import jax
import pytest
from jax.experimental import topologies

from spmd_lm.analysis import topology
from spmd_lm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "platform", "size"),
    [
        ("cpu:8", "cpu", 8),
        ("v5p:4x4x4", "tpu", 64),
        ("v6e:16x16", "tpu", 256),
        ("2*v5e:16x16", "tpu", 512),
        ("h100:2x8", "gpu", 16),
        ("b200:2x8", "gpu", 16),
        ("gb200:1x72", "gpu", 72),
        ("t4:1x4", "gpu", 4),
        ("v4:4x4x4", "tpu", 64),
        ("7x:4x4x4", "tpu", 128),
    ],
)
def test_names_of_hardware(text, platform, size):
    parsed = topology.parse_topology(text)
    assert (parsed.platform, parsed.size, str(parsed)) == (platform, size, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9z:4x4", "'v9z' is not known"),
        ("h100", "not the form of a topology"),
        ("v5p:4x4", "does not come in this shape"),
        ("h100:2x8x2", "does not come in this shape"),
        ("2*h100:2x8", "does not come in this shape"),
        ("v5p:3x4x4", "do not divide 3 by 2"),
        ("cpu:0", "does not come in this shape"),
        ("v5e:32x32", "no slice of v5e is 32 chips long"),
        ("", "not the form of a topology"),
        ("h100:1x8\n", "not the form of a topology"),
    ],
)
def test_unknown_hardware_is_refused_with_what_is_known(text, message):
    with pytest.raises(ConfigError, match=message) as error:
        topology.parse_topology(text)
    assert "\n" not in str(error.value)
    assert "Known: cpu:8" in str(error.value) and "v5p:4x4x4" in str(error.value) and "h100:2x8" in str(error.value)


def test_a_missing_compiler_names_the_extra_to_install(monkeypatch):
    def find_spec(name: str):
        if "." in name:
            raise ModuleNotFoundError(f"No module named '{name.split('.')[0]}'")

    monkeypatch.setattr(topology.importlib.util, "find_spec", find_spec)
    for text in ("v5p:4x4x4", "h100:2x8"):
        with pytest.raises(ConfigError, match=r"pip install 'spmd-lm\[aot\]'"):
            topology.parse_topology(text).devices()


def test_devices_that_the_compiler_does_not_know(monkeypatch):
    def get_topology_desc(**options):
        raise jax.errors.JaxRuntimeError("no such slice\nand a trace")

    monkeypatch.setattr(topology, "is_installed", lambda name: True)
    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    with pytest.raises(
        ConfigError, match=r"--topology v5p:4x4x4: .* does not know these devices: no such slice\. Known"
    ):
        topology.parse_topology("v5p:4x4x4").devices()
