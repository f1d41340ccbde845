"""The parts of `make bench-gpu`, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_lm.config.attention_kernels import choose_kernel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("products", "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT gemm_fusion_dot_12 dot_general.5 aten::mm aten::addmm"),
        ("products", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64 triton_tem_fused_mm_7"),
        ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"),
        ("attention", "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel fmha_cutlassB_bf16_aligned_64x64"),
        ("other kernels", "triton_poi_fused_addmm_gelu_3 triton_per_fused_native_layer_norm_mm_1 loop_add_fusion_4"),
        ("other kernels", "input_reduce_fusion_2 multi_tensor_apply_kernel command_buffer dotted"),
        ("copies", "MemcpyD2D Memset copy.12 aten::copy_"),
    ],
)
def test_a_kernel_is_known_by_its_name(benchmark_script, kind, names):
    kernels = benchmark_script("gpu_kernels")
    assert {name: kernels.kind_of(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


def test_kernels_that_overlap_are_not_idle_twice(benchmark_script):
    kernels = benchmark_script("gpu_kernels")
    # Two steps: 0 to 4 with another stream's kernel inside, and 6 to 9 in two kernels, one after the other.
    events = [("gemm", 0, 4), ("loop_add", 1, 2), ("gemm", 6, 1), ("flash", 7, 2)]
    profile = kernels.summarize([kernels.Kernel(*event) for event in events], steps=2)
    assert profile == {"kernels": {"gemm": 2.5, "loop_add": 1, "flash": 1}, "idle": 1}
    want = {"products": 2.5, "attention": 1, "other kernels": 1, "copies": 0, "idle": 1}
    assert kernels.by_kind(profile) == want
    with pytest.raises(ValueError, match="no kernels"):
        kernels.summarize([], steps=2)


@pytest.mark.parametrize(
    ("size", "millions"), [("gpt2-124m", 124), ("gpt2-355m", 355), ("gpt2-1.2b", 1213), ("bert-large", 336)]
)
def test_sizes_are_the_named_models_with_cudnns_attention(benchmark_script, size, millions):
    config = benchmark_script("gpu_sizes").load_size(size)
    assert choose_kernel(config, "gpu").kernel == "cudnn"
    assert config.train.batch % config.parallel.microbatches == 0 and config.precision.compute == "bfloat16"
    m = config.model
    parameters = m.layers * (12 * m.width**2 + 13 * m.width) + (m.vocab + m.context + m.token_types) * m.width
    assert parameters / 1e6 == pytest.approx(millions, rel=0.007)


def test_what_keeps_a_step_from_60_percent_is_said(benchmark_script):
    gpu_step = benchmark_script("gpu_step")
    kinds = {"products": 0.040, "attention": 0.010, "other kernels": 0.015, "copies": 0.001, "idle": 0.004}
    row = {
        "step_seconds": {"median": 0.070},
        "ratio": 1.0,
        "tokens_per_second": 1e5,
        "mfu": 0.5,
        "memory_bytes": 2**31,
        "seconds_by_kind": kinds,
        "kernels": {"nvjet": 0.03, "flash": 0.01},
    }
    peak = {"peak_flops": 1e15, "peak_source": "NVIDIA H100, published", "device": "NVIDIA H100"}
    result = {"size": "x", "tokens": 7000, "flops": 3.5e13, "product_flops": 3.2e13, "rows": {"spmd-lm": row}} | peak
    text = gpu_step.render(result)
    assert "spmd-lm                70.0  1.000   100,000  50.0%    2.0           40.0           10.0" in text
    assert "60% of NVIDIA H100, published would be 58.3 ms a step" in text
    assert "spmd-lm: matrix products 40.0 ms at 80% of the peak, all else 30.0 ms" in text
    assert "nvjet 30.00, flash 10.00" in text


def test_a_wrong_size_or_setting_is_one_line():
    for wrong, said in (["gpt-9"], "no size gpt-9"), (["gpt2-tiny", "--set", "model.wdth=3"], "wdth"):
        done = subprocess.run([sys.executable, BENCHMARKS / "gpu_step.py", *wrong], capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", ["gpt2-tiny", "bert-tiny"])
def test_both_programs_train_the_same_model(tmp_path, size):
    """A CPU computes them in float32; PyTorch is not compiled, which takes a C++ compiler and longer than the rest."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    file = tmp_path / "rows.json"
    line = [sys.executable, BENCHMARKS / "gpu_step.py", size, "--rounds", "1", "--eager", "--json", file]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(file.read_text())
    assert set(result["rows"]) == {"spmd-lm", "torch"}
    for row in result["rows"].values():
        assert row["tokens_per_second"] > 0 and 0 < row["mfu"] < 1 and row["seconds_by_kind"]["products"] > 0
    # Learning, and not by the same amount of anything else.
    assert 0 < result["rows"]["torch"]["loss_difference"] < 1e-5
