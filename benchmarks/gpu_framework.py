"""spmd-lm's train step on one device, for gpu_step.py: through Program, as `spmd-lm bench` times it.

It writes its first weights and its batch to a directory, from which the other programs read them."""

import argparse
import tempfile
from pathlib import Path

import jax
import numpy as np
import workload
from gpu_kernels import Kernel, summarize
from gpu_sizes import load_size
from jax.profiler import ProfileData, ProfileEvent

from spmd_lm.cost_model.flops import Utilization
from spmd_lm.huggingface.config_json import build_config
from spmd_lm.huggingface.safetensors_io import write_json, write_tensors
from spmd_lm.huggingface.transfer import gather_tensor
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from spmd_lm.training.bench import peak_memory, random_batch

ONE_FILE = 2**50


def write_start(program: Program, state: TrainState, directory: Path) -> None:
    """The model as Hugging Face stores it, and tokens.npy and targets.npy, int32 [microbatches, rows, tokens]."""
    leaves = leaves_by_path(program.canonical(state).params)
    architecture, hf_config = build_config(program.config.model, program.config.objective)
    tensors = architecture.tensors({path: leaf.shape for path, leaf in leaves.items()})
    shapes = {tensor.name: jax.ShapeDtypeStruct(tensor.shape, np.float32) for tensor in tensors}
    write_tensors(directory, shapes, (gather_tensor(tensor, leaves, program) for tensor in tensors), ONE_FILE)
    write_json(directory / "config.json", hf_config)
    batch = random_batch(program)
    np.save(directory / "tokens.npy", batch.tokens)
    np.save(directory / "targets.npy", batch.targets)


def executed_kernels(trace: Path) -> list[Kernel]:
    """Kernels of the devices in an xprof trace: a GPU's streams, or the instructions that XLA's CPU threads ran."""
    (file,) = trace.rglob("*.xplane.pb")
    return [
        Kernel(event.name, event.start_ns * 1e-9, event.duration_ns * 1e-9)
        for plane in ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        if (line.name.startswith("Stream") if plane.name.startswith("/device:GPU") else is_instruction(event))
    ]


def is_instruction(event: ProfileEvent) -> bool:
    """True for a CPU's instruction, except loops and calls: the instructions in them have events of their own."""
    return not event.name.startswith(("while", "call")) and any(name == "hlo_op" for name, _ in event.stats)


def main(size: str, directory: Path, steps: int, overrides: list[str]) -> None:
    program = Program(load_size(size, tuple(overrides)), jax.devices()[:1])
    compile_seconds = program.compile()
    state, batch = [program.init()], random_batch(program)
    if not (directory / "config.json").exists():
        write_start(program, state[0], directory)

    def step() -> float:
        state[0], metrics = program.step(state[0], batch)
        return float(jax.block_until_ready((state[0], metrics))[1]["loss"])

    def profile() -> dict:
        with tempfile.TemporaryDirectory() as trace:
            with jax.profiler.trace(trace):
                for _ in range(steps):
                    step()
            return summarize(executed_kernels(Path(trace)), steps)

    def about() -> dict:
        memory, source = peak_memory(program)
        utilization = Utilization.of(program.config, program.plan, program.device)
        return {
            "compile_seconds": compile_seconds,
            "attention": ", ".join(program.model.kernels),
            "memory_bytes": memory,
            "memory_source": source,
            "device": program.device.device_kind,
            "flops": utilization.model_flops,
            "tokens": program.tokens_per_step,
            "peak_flops": utilization.peak and utilization.peak.flops,
            "peak_source": utilization.peak and utilization.peak.source,
        }

    workload.serve(step, {"profile": profile, "about": about})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size")
    parser.add_argument("directory", type=Path, help="of the first weights and the batch")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--profile-steps", type=int, default=3)
    args = parser.parse_args()
    main(args.size, args.directory, args.profile_steps, args.overrides)
