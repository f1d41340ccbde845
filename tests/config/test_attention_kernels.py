import pytest

from spmd_lm.config.attention_kernels import FUSED_KERNELS, choose_kernel, obstacles
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError

GPU, TPU = ("gpu", "bfloat16"), ("tpu", "bfloat16")


def config(
    kernel: str, dtype: str, dropout: float = 0.0, context: int = 128, head_width: int = 64, **run: bool
) -> RunConfig:
    """Unlike a loaded configuration, this one need not pass the checks."""
    sizes = {"layers": 2, "width": 8 * head_width, "heads": 8, "context": context, "vocab": 256}
    return RunConfig.model_validate(
        {
            "run": run,
            "model": sizes | {"attention": kernel, "attention_dropout": dropout},
            "data": {"source": "synthetic"},
            "precision": {"compute": dtype},
            "optim": {"lr": 1e-3},
            "train": {"steps": 1, "batch": 1},
        }
    )


@pytest.mark.parametrize(
    ("asked", "where", "dropout", "context", "kernel", "why"),
    [
        ("auto", ("cpu", "bfloat16"), 0.0, 512, "xla", "at most 512 tokens on a CPU"),
        ("auto", ("cpu", "bfloat16"), 0.0, 1024, "chunked", "no fused kernel for cpu"),
        ("auto", GPU, 0.0, 1024, "cudnn", "fused"),
        ("auto", GPU, 0.1, 1024, "chunked", "attention_dropout=0.1"),
        ("auto", ("gpu", "float16"), 0.0, 1000, "cudnn", "fused"),
        ("auto", ("gpu", "float32"), 0.0, 1024, "chunked", "float32"),
        ("auto", TPU, 0.0, 1024, "splash", "fused"),
        ("auto", ("tpu", "float32"), 0.0, 128, "splash", "fused"),
        ("auto", TPU, 0.1, 1024, "chunked", "attention_dropout=0.1"),
        ("auto", TPU, 0.0, 1000, "chunked", "multiples of 128"),
        ("xla", TPU, 0.0, 1024, "xla", "as configured"),
        ("chunked", GPU, 0.0, 1024, "chunked", "as configured"),
        ("splash", TPU, 0.0, 128, "splash", "as configured"),
    ],
)
def test_the_chosen_kernel_and_why(asked, where, dropout, context, kernel, why):
    platform, dtype = where
    choice = choose_kernel(config(asked, dtype, dropout, context), platform)
    assert choice.kernel == kernel and why in choice.why


@pytest.mark.parametrize(
    ("kernel", "platform", "dtype", "head_width", "why"),
    [
        ("splash", "cpu", "bfloat16", 64, "does not run on cpu"),
        ("cudnn", "tpu", "bfloat16", 64, "does not run on tpu"),
        ("cudnn", "gpu", "float32", 64, "takes bfloat16 or float16"),
        ("cudnn", "gpu", "bfloat16", 100, "multiples of 8"),
        ("cudnn", "gpu", "bfloat16", 136, "up to 128"),
    ],
)
def test_an_explicit_kernel_that_cannot_run_is_refused(kernel, platform, dtype, head_width, why):
    with pytest.raises(ConfigError, match=f"model.attention={kernel}.*{why}.*Use model.attention=auto or chunked"):
        choose_kernel(config(kernel, dtype, head_width=head_width), platform)


def test_a_deterministic_run_takes_no_kernel_that_ends_with_deterministic_operations():
    choice = choose_kernel(config("auto", "bfloat16", deterministic=True), "gpu")
    assert choice.kernel == "chunked" and choice.why.startswith("run.deterministic=true: cuDNN's attention")
    assert choose_kernel(config("auto", "bfloat16", deterministic=True), "tpu").kernel == "splash"
    with pytest.raises(ConfigError, match=r"model.attention=cudnn: run.deterministic=true: .*auto or chunked"):
        choose_kernel(config("cudnn", "bfloat16", deterministic=True), "gpu")


@pytest.mark.parametrize(("head_width", "kernel"), [(64, "cudnn"), (100, "chunked"), (128, "cudnn"), (136, "chunked")])
def test_auto_falls_back_where_heads_are_too_wide_or_odd(head_width, kernel):
    assert choose_kernel(config("auto", "bfloat16", head_width=head_width), "gpu").kernel == kernel


def test_soft_caps_and_heads_of_another_width():
    """splash takes both; cuDNN takes no cap."""
    for sizes, of_gpu in (
        ({"attention_softcap": 50.0}, "chunked"),
        ({"head_width": 128}, "cudnn"),
        ({"head_width": 256}, "chunked"),
    ):
        c = config("auto", "bfloat16")
        c = c.model_copy(update={"model": c.model.model_copy(update=sizes)})
        assert (choose_kernel(c, "gpu").kernel, choose_kernel(c, "tpu").kernel) == (of_gpu, "splash")


@pytest.mark.parametrize("kind", ["Tesla T4", "Quadro RTX 6000", "NVIDIA GeForce RTX 2080 Ti"])
def test_gpus_before_ampere_have_attention_in_blocks(kind):
    choice = choose_kernel(config("auto", "float16"), "gpu", kind)
    assert choice == ("chunked", f"cuDNN's attention does not run on a {kind}")
    with pytest.raises(ConfigError, match=f"does not run on a {kind}. Use model.attention=auto or chunked"):
        choose_kernel(config("cudnn", "float16"), "gpu", kind)
    assert choose_kernel(config("auto", "float16"), "gpu", "NVIDIA A100-SXM4-80GB").kernel == "cudnn"


@pytest.mark.parametrize("name", FUSED_KERNELS)
def test_all_obstacles_are_reported(name):
    c = config(name, "float32", dropout=0.1, context=100, head_width=100)
    reported = [o.settings.partition("=")[0] for o in obstacles(FUSED_KERNELS[name], c.model, c.precision.compute)]
    assert (
        reported
        == {
            "cudnn": ["model.attention_dropout", "precision.compute", "model.width"],
            "splash": ["model.attention_dropout", "model.context"],
        }[name]
    )
