"""A notebook's first cell: what it finds, installs and refuses."""

import sys
from email.message import Message
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from spmd_lm.errors import ConfigError
from spmd_lm.runtime import notebook_setup
from spmd_lm.runtime.notebook_setup import Accelerators, find_accelerators, missing_requirements, start_jax


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose nvidia-smi prints and exits as told, and whose PCI devices are those of a folder."""
    monkeypatch.setattr(notebook_setup, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(notebook_setup, "is_installed", lambda name: False)

    def set_up(gpus: str = "", code: int = 0, tpu: str = "", chips: int = 0) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\nprintf '{gpus}'\nexit {code}\n")
        script.chmod(0o755)
        for i in range(chips):
            (tmp_path / "pci" / str(i)).mkdir(parents=True)
            (tmp_path / "pci" / str(i) / "vendor").write_text("0x1ae0\n")
            (tmp_path / "pci" / str(i) / "device").write_text(f"{tpu}\n")

    return set_up


@pytest.mark.parametrize(
    ("gpus", "devices", "extra"),
    [
        (r"580.65.06, 7.5\n", 1, "gpu"),
        (r"570.172.08, 7.5\n", 1, "gpu12"),  # Colab's T4
        (r"580.65.06, 7.0\n580.65.06, 7.0\n", 2, "gpu12"),  # V100s, which CUDA 13 has left behind
    ],
)
def test_the_driver_and_the_gpu_choose_the_cuda(machine, gpus, devices, extra):
    machine(gpus)
    assert find_accelerators() == Accelerators("gpu", devices, extra)


def test_a_cuda_12_plugin_is_not_joined_by_another(machine, monkeypatch):
    machine(r"580.65.06, 7.5\n")
    monkeypatch.setattr(notebook_setup, "is_installed", lambda name: name == "jax-cuda12-plugin")
    assert find_accelerators().extra == "gpu12"


def test_a_driver_without_a_gpu_is_none(machine):
    machine("No devices were found", code=6)
    assert find_accelerators() is None


@pytest.mark.parametrize(
    "answer",
    [
        r"[N/A], [N/A]\n",
        r"580.65.06\n",
        r"580.65.06, 7.5, 3\n",
        r"driver_version, compute_cap\n",
        r"NVIDIA-SMI has failed because it could not communicate with the driver.\n",
        r"580.65.06, nan\n",
        r"\377\376\000\n",
        r"\033[31m580, x\n",
        "9" * 5000 + ", 7.5",
        "",
    ],
)
def test_an_odd_answer_is_no_gpu(machine, answer, capsys):
    """The message is one line, without the answer's escape codes."""
    machine(answer)
    assert find_accelerators() is None
    said = capsys.readouterr().out
    assert said.startswith("Not understood, so that GPUs are not used") is bool(answer) and said.count("\n") < 2
    assert "\033" not in said and len(said) < 500


def test_lines_around_the_answer_are_left_out(machine):
    machine(r"Warning: persistence mode is off\n580.65.06, 7.5\n 580.65.06 ,9.0\n580, 9.0 \n\n")
    assert find_accelerators() == Accelerators("gpu", 3, "gpu")


@pytest.mark.parametrize("script", ["exec sleep 60", "exec yes 580, x", "exit 1", "kill -9 $$", "nonsense("])
def test_an_nvidia_smi_that_hangs_floods_or_dies_is_none(machine, tmp_path, monkeypatch, script):
    machine()
    monkeypatch.setattr(notebook_setup, "DRIVER_SECONDS", 0.3)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    assert find_accelerators() is None


def test_an_nvidia_smi_that_cannot_be_run_is_none(machine, tmp_path, capsys):
    machine()
    (tmp_path / "nvidia-smi").write_bytes(b"\0")
    assert find_accelerators() is None and "nvidia-smi does not tell" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "devices"), [("0x0063", 8), ("0x0027", 16), ("0x0042", None)])
def test_tpus_are_counted_by_their_pci_ids(machine, device, devices):
    """The last one is Google's network card."""
    machine(code=1, tpu=device, chips=8)
    assert find_accelerators() == (Accelerators("tpu", devices, "tpu") if devices else None)


def test_what_is_missing(monkeypatch):
    """An extra's own extras count, and a version that will not do."""
    of_spmd_lm, of_jax = ["jax>=0.10", "jax[tpu]>=0.10; extra == 'tpu'"], ["libtpu==3.*; extra == 'tpu'", "numpy>=2"]
    versions = {"spmd-lm": "1", "packaging": "26", "jax": "0.10", "libtpu": "3.1"}
    extras = Message()
    extras["Provides-Extra"] = "tpu"
    monkeypatch.setattr(notebook_setup, "requires", {"spmd-lm": of_spmd_lm, "jax": of_jax}.get)
    monkeypatch.setattr(notebook_setup, "version", versions.get)
    monkeypatch.setattr(notebook_setup, "metadata", {"spmd-lm": extras}.get)
    assert list(missing_requirements("gpu12")) == ["spmd-lm[gpu12]"]
    assert list(missing_requirements("tpu")) == ["numpy>=2"]
    versions |= {"numpy": "2.1"}
    assert list(missing_requirements("tpu")) == []
    versions |= {"libtpu": "2.9", "jax": "0.7.2"}
    assert list(missing_requirements()) == ["jax>=0.10"]
    versions |= {"jax": "0.11"}
    assert [name[:6] for name in missing_requirements("tpu")] == ["libtpu"]


def test_a_module_that_was_replaced_after_it_was_imported(monkeypatch):
    assert list(notebook_setup.replaced_modules()) == []
    monkeypatch.setitem(sys.modules, "flax", SimpleNamespace(__version__="0.11.2"))
    with pytest.raises(ConfigError, match=r"had imported flax 0\.11\.2, which .* Restart the runtime"):
        notebook_setup.set_up_notebook()


def test_what_pip_cannot_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"pip could not install .*\[gpu12\]"):
        notebook_setup.install(tmp_path, "gpu12")


def test_jax_on_another_device_than_the_machine_has(capsys):
    with pytest.raises(ConfigError, match=r"has a tpu, and jax runs on cpu\. Restart"):
        start_jax(Accelerators("tpu", 8, "tpu"), 8)
    start_jax(None, 8)
    assert capsys.readouterr().out == f"jax {version('jax')} on 8 devices: simulated by the CPU\n"
