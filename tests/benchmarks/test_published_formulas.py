"""The papers' tables, to the digits that they print."""

import pytest

from spmd_lm.parallel.pipeline.schedule import make_schedule

# arXiv:2104.04473, table 1: billions of parameters, width, layers, heads, devices, batch, TFLOP/s, PFLOP/s in all
PTD_P = [
    (1.7, 2304, 24, 24, 32, 512, 137, 4.4),
    (3.6, 3072, 30, 32, 64, 512, 138, 8.8),
    (7.5, 4096, 36, 32, 128, 512, 142, 18.2),
    (18.4, 6144, 40, 48, 256, 1024, 135, 34.6),
    (39.1, 8192, 48, 64, 512, 1536, 138, 70.8),
    (76.1, 10240, 60, 80, 1024, 1792, 140, 143.8),
    (145.6, 12288, 80, 96, 1536, 2304, 148, 227.1),
    (310.1, 16384, 96, 128, 1920, 2160, 155, 297.4),
    (529.6, 20480, 105, 128, 2520, 2520, 163, 410.2),
    (1008.0, 25600, 128, 160, 3072, 3072, 163, 502.0),
]
# arXiv:2205.05198, table 3: heads, width, layers, tensor parallelism, stages, devices, batch, seconds, MFU, HFU
RECOMPUTATION = [
    (64, 6144, 48, 8, 4, 1.10, 41.5, 43.7),
    (96, 12288, 96, 64, 64, 13.75, 51.4, 52.8),
    (128, 20480, 105, 280, 280, 37.83, 56.0, 57.0),
    (160, 25600, 128, 512, 512, 71.49, 56.3, 57.0),
]
# The same paper, figure 7: per cent of the memory of tensor parallelism alone: sequence parallelism, selective
# recomputation, both, and full recomputation
ACTIVATIONS = [(0, (67, 49, 16, 8)), (1, (62, 57, 19, 9)), (2, (58, 62, 20, 10)), (3, (58, 62, 20, 10))]
# arXiv:1910.02054, table 1: GB by degree of data parallelism, for stages 1, 2 and 3
ZERO = {
    7.5: {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
          256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
    128: {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8),
          1024: (513, 257, 2)},
    1000: {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
           256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
}  # fmt: skip


@pytest.fixture
def formulas(benchmark_script):
    return benchmark_script("published_formulas")


def last_digit(value):
    """One unit of the last digit that is printed."""
    return 10.0 ** -len(repr(value).partition(".")[2].rstrip("0")) if isinstance(value, float) else 1.0


@pytest.mark.parametrize(("billions", "width", "layers", "heads", "devices", "batch", "tflops", "pflops"), PTD_P)
def test_parameters_and_rates(formulas, billions, width, layers, heads, devices, batch, tflops, pflops):
    sizes = formulas.Sizes(width, layers, heads, 2048, 51200)
    assert round(sizes.parameters / 1e9, 1) == billions
    assert pflops == pytest.approx(tflops * devices / 1e3, rel=0.5 / tflops + 0.05 / pflops)
    # The formula's FLOPs are those of the matrices, one by one: four passes over them, and over the logits three.
    tokens, h = batch * sizes.context, width
    layer = 24 * h**2 + 4 * sizes.context * h
    assert sizes.step_flops(batch, recomputes=True) == pytest.approx(tokens * (4 * layers * layer + 6 * h * 51200))
    assert sizes.step_flops(batch, recomputes=False) == pytest.approx(tokens * (3 * layers * layer + 6 * h * 51200))


@pytest.mark.parametrize(("heads", "width", "layers", "devices", "batch", "seconds", "mfu", "hfu"), RECOMPUTATION)
def test_utilization(formulas, heads, width, layers, devices, batch, seconds, mfu, hfu):
    sizes = formulas.Sizes(width, layers, heads, 2048, 51200)
    model = sizes.step_flops(batch, recomputes=False)
    again = batch * 2048 * layers * 12 * 2048 * width  # attention counts twice in the paper's equation 8
    rate = seconds * devices * 312e12
    # Seconds are printed to 0.005, which of 1.10 is half a per cent.
    assert 100 * model / rate == pytest.approx(mfu, abs=0.05 + 50 * 0.005 / seconds)
    assert 100 * (model + again) / rate == pytest.approx(hfu, abs=0.05 + 60 * 0.005 / seconds)


@pytest.mark.parametrize(("row", "percent"), ACTIVATIONS)
def test_activation_memory(formulas, row, percent):
    heads, width, layers, *_ = RECOMPUTATION[row]
    sizes = formulas.Sizes(width, layers, heads, 2048, 51200)
    baseline = sizes.layer_activations(1, 8, "none", shards_sequence=False)
    found = [
        sizes.layer_activations(1, 8, policy, shards_sequence=sequence) / baseline
        for policy, sequence in (("none", True), ("selective", False), ("selective", True), ("full", False))
    ]
    # The paper rounds 18.48 up.
    assert [100 * share for share in found] == pytest.approx(percent, abs=0.53)


@pytest.mark.parametrize("billions", ZERO)
def test_zero_s_memory(formulas, billions):
    for devices, row in ZERO[billions].items():
        for stage, gigabytes in enumerate(row, 1):
            found = formulas.state_bytes(billions, stage, devices)
            assert abs(found - gigabytes) <= last_digit(gigabytes), (devices, stage, found)


@pytest.mark.parametrize(
    ("tokens", "parameters", "devices", "tflops", "days"),
    [(300e9, 175e9, 1024, 140, 34), (450e9, 1008e9, 3072, 163, 84)],
)
def test_training_days(formulas, tokens, parameters, devices, tflops, days):
    fewest, most = (formulas.training_days(tokens, parameters, devices, 1e12 * (tflops + by)) for by in (0.5, -0.5))
    assert fewest <= days + 0.5 and days - 0.5 <= most


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 1), (8, 64, 3), (35, 280, 3), (64, 512, 1)])
def test_bubble(formulas, stages, microbatches, chunks):
    schedule = make_schedule("interleaved" if chunks > 1 else "1f1b", stages, microbatches, chunks)
    assert schedule.bubble == pytest.approx(formulas.bubble(stages, microbatches, chunks))


def test_activations_in_flight(formulas):
    """Of 530B, 35 stages of 3 chunks hold 1 + 34 / (35 x 3) times the layers of a stage: section 4.2.3."""
    assert formulas.microbatches_in_flight(35, 3) / 35 == pytest.approx(1 + 34 / 105)
    assert formulas.microbatches_in_flight(8, 1) == 8
