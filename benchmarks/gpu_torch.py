"""The step of gpu_step.py by PyTorch: a GPT as nanoGPT builds it, or Hugging Face's BERT, compiled.

Weights are float32, matrix products bfloat16 by autocast on a GPU; AdamW is PyTorch's fused one."""

import argparse
import contextlib
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import workload
from gpu_kernels import Kernel, summarize
from safetensors.torch import load_file
from torch import nn
from transformers import BertForPreTraining

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width: int, heads: int, eps: float):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.attn["c_attn"](x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        return self.attn["c_proj"](y.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 without dropout, its parameters named as Hugging Face names them.  config: a config.json."""

    def __init__(self, config: dict):
        super().__init__()
        width, eps = config["n_embd"], config["layer_norm_epsilon"]
        blocks = (Block(width, config["n_head"], eps) for _ in range(config["n_layer"]))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config["vocab_size"], width),
                "wpe": nn.Embedding(config["n_positions"], width),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(width, eps),
            }
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        t = self.transformer
        x = t["wte"](tokens) + t["wpe"](torch.arange(tokens.shape[1], device=tokens.device))
        for block in t["h"]:
            x = block(x)
        logits = F.linear(t["ln_f"](x), t["wte"].weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bert(nn.Module):
    """Hugging Face's BERT, trained to predict every token, and that each row's two segments are in order."""

    def __init__(self, directory: Path):
        super().__init__()
        self.model = BertForPreTraining.from_pretrained(directory, attn_implementation="sdpa")

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        in_order = torch.zeros_like(tokens[:, 0])
        return self.model(tokens, labels=targets, next_sentence_label=in_order).loss


def load_gpt(directory: Path, config: dict) -> GPT:
    model, weights = GPT(config), load_file(directory / "model.safetensors")
    transposed = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")  # [in, out] in the file
    model.load_state_dict({name: x.T if name.endswith(transposed) else x for name, x in weights.items()})
    return model


def load_model(directory: Path) -> nn.Module:
    """The model in `directory`, in training mode."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    model: nn.Module = load_gpt(directory, config) if config["model_type"] == "gpt2" else Bert(directory)
    return model.train().to(DEVICE)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": workload.WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, workload.LR, (workload.B1, workload.B2), workload.EPS, fused=True)


def executed_kernels(trace: torch.profiler.profile) -> list[Kernel]:
    """The GPU's kernels; on a CPU, operations, each without the time of operations that it calls."""
    kernels = []
    for event in trace.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu == (DEVICE == "cuda"):
            microseconds = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            kernels.append(Kernel(event.name, event.time_range.start * 1e-6, microseconds * 1e-6))
    return kernels


def main(directory: Path, steps: int, eager: bool) -> None:
    torch.set_float32_matmul_precision("high")
    model = load_model(directory)
    optimizer = make_optimizer(model)
    tokens, targets = (torch.from_numpy(np.load(directory / f"{name}.npy")) for name in ("tokens", "targets"))
    batch = list(zip(tokens.long().to(DEVICE), targets.long().to(DEVICE), strict=True))
    forward = model if eager else torch.compile(model)
    on_gpu = DEVICE == "cuda"

    def backward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext():
            loss = forward(tokens, targets) / len(batch)
        loss.backward()
        return loss.detach()

    def step() -> float:
        losses = [backward(tokens, targets) for tokens, targets in batch]
        nn.utils.clip_grad_norm_(model.parameters(), workload.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        return float(torch.stack(losses).sum())

    def profile() -> dict:
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as trace:
            for _ in range(steps):
                step()
        return summarize(executed_kernels(trace), steps)

    def about() -> dict:
        memory = torch.cuda.max_memory_allocated() if on_gpu else None
        return {"compile_seconds": first_step_seconds, "attention": "scaled_dot_product", "memory_bytes": memory}

    start = time.perf_counter()
    backward(*batch[0])
    model.zero_grad(set_to_none=True)
    first_step_seconds = time.perf_counter() - start
    workload.serve(step, {"profile": profile, "about": about})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="of the first weights and the batch")
    parser.add_argument("--profile-steps", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    main(args.directory, args.profile_steps, args.eager)
