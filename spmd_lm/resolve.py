"""Resolves a configuration, including its `auto` settings, into a layout, a plan and a model.

models/, ops/ and parallel/ take sections of a configuration at most, never all of it; a step takes the results."""

import dataclasses
import functools
import math
from typing import Any

import jax

from spmd_lm.adapters import adapters_of, coding_of, require_free_names, require_whole_blocks, trainable_paths
from spmd_lm.axes import MODEL
from spmd_lm.config.attention_kernels import attention_block, choose_kernel
from spmd_lm.config.context_parallel import choose_context_attention
from spmd_lm.config.expert_products import choose_product
from spmd_lm.config.layer_loop import choose_loop
from spmd_lm.config.layout_checks import check_devices
from spmd_lm.config.overlap import collective_matmul_branches, prefetches
from spmd_lm.config.partitioner import choose_partitioner
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.hardware import RATES, find_hardware
from spmd_lm.cost_model.memory import tokens_per_chunk
from spmd_lm.cost_model.sizes import tokens_per_device
from spmd_lm.errors import ConfigError, HostBorderError, LayoutError
from spmd_lm.models.language_model import LanguageModel
from spmd_lm.models.modules import ModelModules, modules_of_model
from spmd_lm.ops.cross_entropy import LogitsPolicy
from spmd_lm.parallel.codecs import Codec
from spmd_lm.parallel.groups import offloaded_parameters
from spmd_lm.parallel.mesh import Layout, Rings, abstract_mesh, host_rings
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.zero import ZeroPolicy
from spmd_lm.runtime.formatting import format_bytes


def layout_on(config: RunConfig, devices: int) -> Layout:
    """The layout of `config` on this many devices.  Raises LayoutError if something is not divisible."""
    if problems := check_devices(config, devices):
        raise LayoutError(*problems)
    degrees = config.parallel.degrees
    others = math.prod(degree for degree in degrees.values() if degree != -1)
    return Layout(**{axis: devices // others if degree == -1 else degree for axis, degree in degrees.items()})


def make_model(
    config: RunConfig,
    platform: str,
    plan: Plan | None = None,
    modules: ModelModules | None = None,
    device_kind: str = "",
) -> LanguageModel:
    """The model of `config`, as a step of `plan` runs it, or for a user's own use.
    modules: default `modules_of_model`.  device_kind: default that of `plan`."""
    modules = modules or modules_of_model(config.model, config.objective)
    if config.train.eval_every and not modules.has_eval_sums:
        head = getattr(modules.head, "__name__", modules.head)
        raise ConfigError(
            f"train.eval_every={config.train.eval_every}: {head} has no eval_sums. Use train.eval_every=0."
        )
    device_kind = plan.device_kind if plan else device_kind
    kernels = tuple(choose_kernel(each, platform, device_kind).kernel for each in config.of_each_kind)
    m, p = config.model, config.precision
    tokens = tokens_per_chunk(config, plan) if plan else None
    logits = LogitsPolicy(p.reduce, p.logits == "compute", tokens)
    scan = plan.scan if plan else choose_loop(config, platform).scan
    overlaps = plan.collective_matmul if plan else ()
    model = LanguageModel(m, config.objective, p.params, kernels, config.remat_policy, logits, scan, overlaps, modules)
    model = dataclasses.replace(model, attention_block=attention_block(platform))
    if m.mixtures:
        products = tuple(choose_product(each, platform).product for each in config.of_each_kind)
        model = dataclasses.replace(model, expert_products=products)
    if modules.own:
        require_free_names(model)
    adapters, base = adapters_of(config.adapter, model), coding_of(config.adapter, p)
    return dataclasses.replace(model, adapters=adapters, base=base, fake_quant=p.fake_quant)


def enable_float64(config: RunConfig) -> None:
    """Switches float64 on, for the whole process, if the config asks for it."""
    if "float64" in (config.precision.params, config.precision.compute, config.precision.reduce):
        jax.config.update("jax_enable_x64", True)


def abstract_plan(
    config: RunConfig,
    devices: int,
    platform: str,
    kind: str,
    modules: ModelModules | None = None,
    host: int | None = None,
) -> Plan:
    """The plan of `config` on devices that need not exist; its mesh is abstract.  Switches float64 on, for the whole
    process, if the config asks for it.  Raises LayoutError if there is no plan, and ConfigError where
    `require_eight_bits` does.

    kind: jax's device_kind, on which some defaults depend.
    modules: as for `make_model`.
    host: devices per host; default that of most hosts with this kind, and two hosts of simulated devices."""
    require_eight_bits(config, platform, kind)
    layout, p = layout_on(config, devices), config.parallel
    enable_float64(config)
    model, layers = make_model(config, platform, None, modules, kind), config.model.unique_layers
    require_whole_blocks(model, layout.model)
    if layout.context > 1 and model.modules.own:
        own = "modules of one's own see some tokens of a row, and nothing checks that they need no others"
        raise LayoutError(f"parallel.context={layout.context}: {own}. Use parallel.context=1.")
    breadth_first = p.schedule == "breadth_first" and layout.pipe > 1
    stage = p.zero if layout.zero_shards > 1 else 0  # one device has every shard
    zero = ZeroPolicy.of_stage(stage, reduce_once=p.reduce_once, layers=layers, breadth_first=breadth_first)
    ahead = layout.zero_shards > 1 and prefetches(config, platform)
    prefetched = (model.period.keys[:1] or model.prefetched) if ahead and not breadth_first else ()
    tokens, over_context = tokens_per_device(config, layout), choose_context_attention(config.model, p)
    collective_matmul = () if model.modules.own_block else collective_matmul_branches(config, platform, kind, tokens)
    plan = _abstract_plan(
        model,
        layout,
        platform,
        config.precision.frozen,
        zero=zero,
        partitioner=choose_partitioner(config, platform, bool(collective_matmul), model.modules.own).partitioner,
        sequence=p.sequence,
        ring=layout.context > 1 and over_context.form == "ring",
        zigzag=layout.context > 1 and over_context.is_zigzag(config.model),
        chunks=config.chunks,
        run_idle_stages=p.run_idle_stages,
        rings=_host_rings(config, layout, platform, kind, host),
        secondary=stage == 3 and p.secondary == "within_host",
        gather_codec=Codec() if stage == 3 and p.quantize_gather == "int8" else None,
        scatter_codec=_scatter_codec(p.quantize_scatter, platform) if stage == 3 else None,
        prefetch=prefetched,
        prefetch_chunks=ahead and breadth_first,
        collective_matmul=collective_matmul,
        scan=choose_loop(config, platform, prefetch=bool(prefetched), scatters=zero.scatters_in_backward).scan,
        device_kind=kind,
        freeze=tuple(config.optim.freeze.split()),
        trainable=trainable_paths(config.adapter, model, config.optim.freeze.split()),
        own_rules=model.modules.rules,
        replicated=("kv_heads",) if any((c.kv_heads or c.heads) % p.model for c in config.model.of_each_kind) else (),
    )
    if (memory := config.optim.offload) != "none" and not offloaded_parameters(plan):
        raise ConfigError(f"optim.offload={memory}: no matrix is trained, and vectors stay. Use optim.offload=none.")
    return plan


def require_eight_bits(config: RunConfig, platform: str, kind: str) -> None:
    """Raises ConfigError if precision.matmul asks for matmuls that devices of this kind are not known to have, and are
    not to emulate."""
    p = config.precision
    if p.matmul != "none" and not p.emulate and (problem := lacks_eight_bits(p.matmul, platform, kind)):
        hardware = find_hardware(kind) if platform != "cpu" else None
        others = [name for name, rate in RATES.items() if hardware and rate in hardware.peaks]
        ways = "precision.matmul=none, or precision.emulate=true to run it anyway"
        instead = f"precision.matmul={others[0]}, or " if others else ""
        raise ConfigError(f"precision.matmul={p.matmul}: {problem}. Use {instead}{ways}.")


def lacks_eight_bits(matmul: str, platform: str, kind: str) -> str:
    """Why devices of this kind are not known to multiply so; '' if they do."""
    if platform == "cpu":
        return "a CPU has no such matmuls"
    if (hardware := find_hardware(kind)) is None:
        return f"nothing is known of matmuls of {kind}"
    return "" if RATES[matmul] in hardware.peaks else f"{kind} has no matmuls of {RATES[matmul]}"


def _scatter_codec(codes: str, platform: str) -> Codec | None:
    if codes == "none":
        return None
    return Codec(8) if codes == "int8" else Codec(4, packed=platform != "tpu")


def _host_rings(config: RunConfig, layout: Layout, platform: str, kind: str, host: int | None) -> Rings | None:
    """The rings into which this run's `data` is split, or None.  Raises HostBorderError where a secondary copy needs
    them and no border of a host lies within `data`; gradients then take one hop."""
    p = config.parallel
    if (p.secondary, p.quantize_scatter) == ("none", "none") or layout.zero_shards == 1:
        return None
    if p.secondary == "none" and platform == "tpu":
        return None  # make_mesh makes those of its torus
    chosen, off = "parallel.secondary=within_host", "Use parallel.secondary=none."
    if platform == "tpu":
        raise HostBorderError(f"{chosen} on a TPU: the links of a slice join devices of all its hosts alike. {off}")
    hardware = find_hardware(kind)
    rings = host_rings(layout, host or (hardware.devices_per_host if hardware and platform == "gpu" else None))
    if rings.hosts == 1 or rings.within == 1:
        if p.secondary == "none":
            return None
        where = "on one host: nothing is gathered across hosts" if rings.hosts == 1 else "on hosts of their own"
        raise HostBorderError(f"{chosen}: all {layout.data} devices of `data` are {where}. {off}")
    return rings


@functools.lru_cache(maxsize=64)  # a search asks for each plan again, for many microbatch counts and schedules
def _abstract_plan(
    model: LanguageModel, layout: Layout, platform: str, frozen: str | None, rings: Rings | None, **fields: Any
) -> Plan:
    """frozen: the dtype of frozen parameters; None for the model's.
    rings: those into which `data` is split, or None.
    fields: of Plan.

    Shapes depend on x64 too, which `enable_float64` has already set if the model needs it."""
    mesh, host_rings = abstract_mesh(layout, rings), rings is not None
    plan = Plan(layout, mesh, platform, model.names, model.shapes, host_rings=host_rings, **fields)
    return plan if frozen is None else plan.with_frozen(frozen)


def require_model_within_domain(config: RunConfig, plan: Plan, domains: int) -> None:
    """Raises LayoutError if `model` spans several hosts or TPU slices without parallel.model_across_hosts."""
    if domains > 1 and not config.parallel.model_across_hosts:
        raise LayoutError(_cost_across_hosts(config, plan, domains))


def _cost_across_hosts(config: RunConfig, plan: Plan, domains: int) -> str:
    sent = sum(row.bytes for row in expected_collectives(config, plan) if MODEL in row.axes)
    links, domain = ("ICI", "slices") if plan.platform == "tpu" else ("NVLink", "hosts")
    return (
        f"parallel.model={plan.layout.model} spans {domains} {domain}: of each step, every device would send "
        f"{format_bytes(sent)} over their network, which is many times slower than {links}. Use "
        f"parallel.model={plan.layout.model // domains}, or parallel.model_across_hosts=true."
    )
