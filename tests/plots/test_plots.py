"""Pictures say what the plan says, for any name, any records and any mesh, and without jax."""

import math
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import spmd_lm
from spmd_lm import plots
from spmd_lm.parallel.pipeline.schedule import make_schedule
from spmd_lm.plots.lines import isolated, series, thin_out
from spmd_lm.plots.rings import chunks_of_device, ring_scores
from spmd_lm.plots.style import TEXT, WIDTH, abbreviated, format_tick, printable

HOSTILE = 'a $x$_<b>\x00&"quoted"\ud800'


def plan(*overrides):
    return spmd_lm.plan(spmd_lm.load_config("configs/debug.yaml", *overrides))


@pytest.fixture(scope="module")
def pipeline():
    sizes = "run.simulate_devices=16", "parallel.model=2", "parallel.pipe=2"
    return plan(*sizes, "parallel.microbatches=4", "parallel.zero=3")


def texts(figure) -> list[str]:
    """Texts written in a figure."""
    figure.to_svg()  # labels of axes are made when it is drawn
    return [each.get_text() for each in figure.findobj(lambda a: hasattr(a, "get_text")) if each.get_text()]


def records(*losses, **more):
    return [{"step": i, "tokens": 64 * i, "loss": loss, **more} for i, loss in enumerate(losses, 1)]


def test_a_mesh_shows_every_device_where_it_stands(pipeline):
    import jax

    from spmd_lm.parallel.mesh import Layout, make_mesh

    found = texts(plots.mesh(pipeline))
    assert [each for each in found if each.isdecimal()] == [str(n) for n in (*stage(0), *stage(1))]
    assert {"stage 0", "stage 1", "data 3", "model 1", "pipe 2 × replica 1 × data 4 × model 2"} <= set(found)
    layout = Layout(replica=2, data=2, model=2)
    devices = make_mesh(layout, jax.devices()).devices
    found = [each for each in texts(plots.mesh({"mesh": layout.sizes})) if each.isdecimal()]
    assert found == [str(device.id) for device in devices.ravel()]


def stage(number):
    """Devices are counted with `model` innermost, then `pipe`, then `data`."""
    return [4 * data + 2 * number + model for data in range(4) for model in range(2)]


def test_the_load_of_experts_has_a_row_for_each_layer():
    load = [[0.5, 1.0, 1.5, 1.0], [4.0, 0.0, 0.0, 0.0]]
    figure = plots.expert_load(load)
    (image,) = figure.axes[0].images
    assert image.get_array().tolist() == load and {"none", "even", "twice", "expert"} <= {*texts(figure)}
    plots.expert_load([[1.0] * 2048] * 96).to_svg()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("devices", [2, 3, 8, 20])
def test_hops_of_a_ring_have_each_visible_pair_of_chunks_once(devices, causal):
    hops = [ring_scores(hop, devices, causal) for hop in range(devices)]
    chunks = 2 * devices if causal else devices
    pairs = [pair for hop in hops for pair in hop]
    visible = {(i, j) for i in range(chunks) for j in range(chunks) if j <= i or not causal}
    assert {*pairs} == visible and len(pairs) == len(visible)
    for number, hop in enumerate(hops):
        work = np.bincount(list(hop.values()), minlength=devices)
        assert (work == ((2 if number else 3) if causal else 1)).all()
    if not causal:
        assert hops[1] == {(device, (device - 1) % devices): device for device in range(devices)}
    figure = plots.ring(devices, causal)
    assert f"hop {devices - 1}" in texts(figure)
    picture = figure.axes[0].images[0].get_array()
    of_device = {tuple(picture[pair]) for pair, device in hops[0].items() if device == 0}
    assert len(of_device) == 1 and tuple(picture[0, 1]) == (1, 1, 1)  # not yet


def test_a_ring_s_chunks_are_those_that_a_device_has():
    from spmd_lm.active_rules import AxisRules, use_axis_rules
    from spmd_lm.ops.collectives import time_positions

    with use_axis_rules(AxisRules({"time": ("context",)}, {"context": 4}, ring=True, zigzag=True)):
        positions = [time_positions(2, device) for device in range(4)]
    assert [list(each) for each in positions] == [chunks_of_device(device, 4, causal=True) for device in range(4)]


def test_a_large_mesh_is_abbreviated():
    found = texts(plots.mesh({"mesh": {"pipe": 16, "replica": 2, "data0": 16, "data1": 8, "model": 8}}))
    assert "32767" in found and "…" in found and len(found) < 500


def test_a_sharding_names_the_devices_that_hold_each_shard(pipeline):
    found = texts(plots.sharding(pipeline, "embedding.tokens"))
    assert {"0:128", "128:256", "48:64", "0 2", "13 15"} <= set(found)  # both stages have it
    assert "down: vocab, 256: 2 parts over model" in found
    found = texts(plots.sharding(pipeline, "blocks.mlp.up"))
    assert {"layers 0:2", "layers 2:4", "0:128", "48:64", "14", "15"} <= set(found)
    with pytest.raises(KeyError, match=r"blocks\.mlp\.up"):
        plots.sharding(pipeline, "blocks.mlp.sideways")


@pytest.mark.parametrize("spec", [("data", "model"), (None, "model"), (("data", "model"), None), ()])
def test_the_sharding_of_an_array_is_jax_s_own(spec):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from spmd_lm.parallel.mesh import Layout, make_mesh

    mesh = make_mesh(Layout(data=4, model=2), jax.devices())
    array = jax.device_put(np.zeros((16, 8)), NamedSharding(mesh, PartitionSpec(*spec)))
    found = texts(plots.sharding_of(array, HOSTILE))
    shards = {}
    for shard in array.addressable_shards:
        shards.setdefault(str(shard.index), []).append(shard.device.id)
    for devices in shards.values():
        numbers = " ".join(map(str, sorted(devices)))
        assert numbers in found or f"{devices[0]} {devices[1]} … {devices[-1]}" in found


def test_memory_adds_up(pipeline):
    plain = plan("run.simulate_devices=8")
    figure = plots.memory({"ZeRO-0": plain, HOSTILE: pipeline}, capacity=2**21)
    lengths = sum(patch.get_width() for patch in figure.axes[0].patches if patch.get_y() > 0.5)
    assert lengths == sum(pipeline["memory"].values())
    found = texts(figure)
    assert f"ZeRO-0:  {sum(plain['memory'].values()) / 2**20:.1f} MiB" in found and {
        *pipeline["memory"],
        "limit 2.0 MiB",
    } <= set(found)


def test_collectives_stand_beside_theory():
    row = {"kind": "all-reduce", "axes": ["data", "model"], "bytes": 1024.0}
    audit = {"theory": [row, row | {"kind": "all-gather"}], "collectives": [row, row]}
    found = texts(plots.collectives(audit))
    assert {"all-reduce over data × model", "all-gather over data × model", "theory", "compiled"} <= set(found)
    assert found.count("1.0 KiB") == 2 and found.count("2.0 KiB") == 1
    assert "a step sends nothing" in texts(plots.collectives([]))
    assert f"{printable(HOSTILE, 24)} theory" in texts(plots.collectives({HOSTILE: [row], "b": [row]}))


@pytest.mark.parametrize("kind, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("breadth_first", 2)])
def test_a_schedule_shows_every_task_twice(kind, chunks):
    s = make_schedule(kind, 4, 8, chunks)
    figure = plots.schedule(kind, 4, 8, chunks)
    found = texts(figure)
    for task in s.forward_order:
        name = f"{task.microbatch}{'ab'[task.chunk] if chunks > 1 else ''}"
        assert found.count(name) == 2 * s.stages
    boxes = figure.axes[0].patches[:-3]  # without the legend's
    idle = sum(box.get_width() for box in boxes if box.get_hatch()) / sum(box.get_width() for box in boxes)
    assert idle / (1 - idle) == pytest.approx(s.bubble)  # it is to scale


def test_a_schedule_is_that_of_the_plan(pipeline):
    assert "1f1b: 2 stages, 4 microbatches" in texts(plots.schedule(pipeline))
    assert len(texts(plots.schedule("1f1b", 64, 512))) < 2500
    with pytest.raises(ValueError, match=r"parallel\.pipe"):
        plots.schedule(plan("run.simulate_devices=8"))
    with pytest.raises(ValueError, match="interleaved"):
        plots.schedule("2f2b")


@pytest.mark.parametrize(
    "runs, expected",
    [
        ([], {"not recorded"}),
        (records(3.0, 2.0, eval_loss=2.5), {"training", "evaluation", "loss (nats)"}),
        ([{"step": 1, "eval_loss": 2.0}], {"evaluation"}),
        (records(None, None), {"not recorded"}),
        ({HOSTILE: records(3.0, 2.0), "_hidden": records(1.0)}, {printable(HOSTILE), " _hidden"}),
        ({str(i): records(3.0, 2.0) for i in range(30)}, {"and 19 more"}),
    ],
    ids=["nothing", "both", "evaluations alone", "null", "hostile names", "many"],
)
def test_curves_of_whatever_was_recorded(runs, expected, tmp_path):
    figure = plots.curves(runs)
    assert expected <= set(texts(figure))
    figure.savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_number_leaves_a_gap():
    x, y = series(records(3.0, None, math.inf, 2.0, 1.0, True, "a"), "loss", "tokens")
    assert x.tolist() == [64, 128, 192, 256, 320, 384, 448]
    assert np.isnan(y).tolist() == [False, True, True, False, False, True, True]
    assert isolated(y) == [0] and isolated(np.array([1.0])) == [0]


def test_a_long_run_keeps_its_extremes():
    losses = np.linspace(5, 2, 100_000)
    losses[[12_345, 23_456, 34_567]] = 9.0, np.nan, 0.5
    x, y = thin_out(np.arange(100_000.0), losses)
    assert len(x) <= 1001 and (np.diff(x) > 0).all()
    assert {12_345, 23_456, 34_567, 0, 99_999} <= set(x.tolist())
    assert np.isnan(y).sum() == 1


def test_measured_and_published_scaling_are_told_apart():
    figure = plots.efficiency({"ours": {4: 0.9, 1: 1.0}}, {"paper": {8: 1.0, 16: 0.8}})
    measured, published, _ = figure.axes[0].lines
    assert measured.get_xydata().tolist() == [[1, 1], [4, 0.9]] and published.get_ydata().tolist() == [1, 0.8]
    assert (measured.get_linestyle(), published.get_linestyle()) == ("-", "--")
    assert {"ours (measured)", "paper (published)", "100%"} <= set(texts(figure))


def test_a_scaling_law_passes_through_its_points():
    """Loss 2 + 100 / sqrt(N) + 1000 / sqrt(D), with a run that did not converge."""

    class Law:
        outliers = (3,)

        def predict(self, parameters, tokens):
            loss = 2 + 100 / np.sqrt(parameters) + 1000 / np.sqrt(tokens)
            return loss, loss - 0.1, loss + 0.1

    sizes = [(1e6, 1e8), (1e6, 4e8), (4e6, 1e8), (4e6, 4e8)]
    points = [(n, d, float(Law().predict(n, d)[0])) for n, d in sizes[:3]] + [(*sizes[3], 9.0)]
    figure = plots.scaling_law(points, Law())
    assert {"1M parameters", "4M parameters", "100M", "tokens"} <= set(texts(figure))
    curves, dots = figure.axes[0].lines[::3], figure.axes[0].lines[1::3]
    for curve, dot in zip(curves, dots, strict=True):
        assert np.interp(dot.get_xdata(), *curve.get_data()) == pytest.approx(dot.get_ydata(), rel=1e-3)
    assert figure.axes[0].lines[5].get_ydata().tolist() == [9.0]  # hollow
    assert {"100M tokens", "400M tokens", "parameters"} <= set(
        texts(plots.scaling_law(points, Law(), over="parameters"))
    )


def test_a_metric_of_several_runs_is_a_bar_for_each():
    figure = plots.compare({"one": 1200.0, "two": 300.0}, "tokens_per_second")
    assert [bar.get_width() for bar in figure.axes[0].patches] == [1200, 300]
    assert {"tokens per second", "one:  1.2k", "two:  300"} <= set(texts(figure))


def test_every_text_is_legible_and_none_is_math(pipeline):
    figures = [plots.mesh(pipeline), plots.memory(pipeline), plots.schedule(pipeline), plots.curves(records(3.0, 2.0))]
    for figure in [*figures, plots.sharding(pipeline, "blocks.mlp.up"), plots.goodput({HOSTILE: {"step": 3.0}})]:
        assert figure.get_size_inches()[0] >= WIDTH
        for text in figure.findobj(lambda a: hasattr(a, "get_parse_math")):
            assert text.get_fontsize() >= TEXT
            assert not (text.get_text() and text.get_parse_math())


class Svg(HTMLParser):
    """Collects an SVG's ids, what refers to ids, and its texts."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.references, self.texts = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            self.ids += [value] if name == "id" else []
            if name == "href" or "url(" in (value or ""):
                self.references.add(value.partition("#")[2].rstrip(")").split(")")[0])

    def handle_data(self, data):
        self.texts.append(data)


def test_svgs_share_a_page(pipeline):
    """No id stands twice, every reference finds its id, and names are text, not markup."""
    svgs = [plots.memory({HOSTILE: pipeline}).to_svg(name) for name in ("first", "second")]
    svgs += [plots.schedule(pipeline).to_svg(), plots.curves(records(3.0, 2.0)).to_svg()]
    parsed = Svg("".join(svgs))
    assert len(parsed.ids) == len(set(parsed.ids))
    assert parsed.references and parsed.references <= set(parsed.ids)
    assert any(each.startswith('a $x$_<b> &"quoted"') for each in parsed.texts)
    assert "http" not in "".join(svgs)
    "".join(svgs).encode()  # the lone surrogate is gone


def test_a_notebook_shows_a_figure():
    image, size = plots.curves(records(3.0, 2.0))._repr_png_()
    assert image.startswith(b"\x89PNG") and size == {"width": 420, "height": 290}


def test_plots_import_neither_jax_nor_pyplot():
    code = "import sys, spmd_lm.plots; print(sorted({'jax', 'matplotlib.pyplot'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_ticks_and_names():
    assert [format_tick(x) for x in (0, 0.25, 12, 31_400, 2e6, 1e-4, -1500, 3e-17)] == [
        *("0", "0.25", "12", "31.4k", "2M", "1e-4", "-1.5k", "0")
    ]
    assert abbreviated(5, 8) == [0, 1, 2, 3, 4] and abbreviated(20, 8) == [0, 1, 2, 3, None, 17, 18, 19]
    assert printable("x" * 50) == "x" * 24 + "…" + "x" * 7
