"""Quantized matrices in files that transformers reads: compressed-tensors' "pack-quantized" for int8 and int4, and
bitsandbytes' 4 bits for nf4.

Both store a matrix as [outputs, inputs], and an output's codes and scales along its inputs.  So what a tensor joins of
several parameters, outputs beside outputs, is joined alike in codes and in scales."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.architectures import LAYER, Architecture, HFTensor, Shape
from spmd_lm.ops.few_bits import LARGEST_CODE, NF4, CodedMatrix, Coding

BITS = {"int8": 8, "int4": 4}
WORD = 32  # bits of an int32, which holds 4 or 8 codes of an output
BLOCKS = tuple(2**n for n in range(6, 13))  # sizes that bitsandbytes decodes on all devices


def quantization_config(coding: Coding, architecture: Architecture, dtype: str) -> dict[str, Any]:
    """The key of config.json by which readers know the format.  dtype: of other tensors, and what they compute in.
    Raises ConfigError if there is no format for it."""
    chosen = f"precision.quantized={coding.bits}"
    if coding.bits == "int3":  # ten in an int32 in 0.15.0, 32 in three in 0.20.1
        raise ConfigError(
            f"{chosen}: versions of compressed-tensors pack 3 bits differently, so they are not written. Evaluate and "
            "generate with this run here, or quantize the model to int4: spmd-lm quantize --bits int4."
        )
    kept = _unquantized_modules(architecture)
    if coding.bits == "nf4":
        if coding.group not in BLOCKS:
            sizes = ", ".join(map(str, BLOCKS))
            raise ConfigError(
                f"{chosen} with precision.quantized_group={coding.group}: bitsandbytes, whose format it is, has groups "
                f"of {sizes}. Quantize the model with one of them: spmd-lm quantize --group 64."
            )
        nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        return {"quant_method": "bitsandbytes", **nf4, "llm_int8_skip_modules": kept}
    if not _are_linear(architecture):
        raise ConfigError(
            f"{chosen}: matrices of {architecture.model_type} are of transformers' Conv1D, which compressed-tensors, "
            "whose format it is, does not read. Quantize the model to nf4: spmd-lm quantize --bits nf4 --group 64."
        )
    weights = {"num_bits": BITS[coding.bits], "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": coding.group} if coding.group else {"strategy": "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": kept,
    }


def _unquantized_modules(architecture: Architecture) -> list[str]:
    """Matrices outside of layers, including the head of tied embeddings."""
    heads = [each.tensor for each in architecture.weights if each.param.startswith("head.")]
    names = (name for name in (*heads, *architecture.buffers) if LAYER not in name and "norm" not in name.lower())
    modules = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    return [*dict.fromkeys((*modules, "lm_head"))]  # transformers 5 calls GPT-NeoX's embed_out so


def _are_linear(architecture: Architecture) -> bool:
    """True if matrices are stored [outputs, inputs], as torch's Linear has them; GPT-2's are [inputs, outputs]."""
    return any(each.transposed for each in architecture.weights if each.param == "blocks.attention.query")


def matrix_shape(tensor: HFTensor, transposed: bool) -> Shape:
    """[outputs, inputs].  transposed: whether our matrices are multiplied transposed, and so are [outputs, inputs]."""
    return tensor.shape if tensor.transposed != transposed else tensor.shape[::-1]


def abstract(name: str, shape: Shape, coding: Coding, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """What a file has in place of the weight `name` [outputs, inputs], in the order of `encode`."""
    outputs, inputs = shape
    groups = inputs // (coding.group or inputs)
    if coding.bits == "nf4":
        return {
            name: jax.ShapeDtypeStruct((outputs * inputs // 2, 1), np.uint8),
            f"{name}.absmax": jax.ShapeDtypeStruct((outputs * groups,), np.float32),
            f"{name}.quant_map": jax.ShapeDtypeStruct(NF4.shape, np.float32),
            f"{name}.quant_state.bitsandbytes__nf4": jax.ShapeDtypeStruct(_state(shape, coding, dtype).shape, np.uint8),
        }
    return {
        f"{name}_packed": jax.ShapeDtypeStruct((outputs, -(-inputs * BITS[coding.bits] // WORD)), np.int32),
        f"{name}_scale": jax.ShapeDtypeStruct((outputs, groups), dtype),
        f"{name}_shape": jax.ShapeDtypeStruct((2,), np.int64),
    }


def encode(tensor: HFTensor, matrices: Sequence[CodedMatrix], dtype: str) -> list[np.ndarray]:
    """The values of `abstract`, from the matrices of a tensor's parts."""
    first = matrices[0]
    codes = tensor.join(np.asarray(matrix.codes) for matrix in matrices)
    scales = tensor.join(np.asarray(matrix.scales) for matrix in matrices)
    if tensor.transposed == first.transposed:
        codes, scales = codes.T, scales.T
    return (bitsandbytes if first.coding.bits == "nf4" else pack_quantized)(codes, scales, first.coding, dtype)


def pack_quantized(codes: np.ndarray, scales: np.ndarray, coding: Coding, dtype: str) -> list[np.ndarray]:
    """codes: [outputs, inputs], multiples of a scale.  scales: the largest magnitudes [outputs, groups], float32."""
    inverse = np.float32(1) / np.float32(LARGEST_CODE[coding.bits])  # XLA divides by a constant so
    return [_pack(codes, BITS[coding.bits]), (scales * inverse).astype(dtype), np.array(codes.shape, np.int64)]


def bitsandbytes(codes: np.ndarray, scales: np.ndarray, coding: Coding, dtype: str) -> list[np.ndarray]:
    """codes: [outputs, inputs], indices in NF4.  scales: likewise, one for each group of inputs, float32."""
    pairs = codes.reshape(-1, 2)
    return [pairs[:, :1] << 4 | pairs[:, 1:], scales.reshape(-1), NF4, _state(codes.shape, coding, dtype)]


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [outputs, words] of codes [outputs, inputs], which it holds from its lowest bits on, from 0 upwards."""
    fields = codes.astype(np.uint8) + np.uint8(2 ** (bits - 1))  # modulo 256
    octets = np.pad(fields, ((0, 0), (0, -codes.shape[1] % (WORD // bits))))
    if bits == 4:
        octets = octets[:, ::2] | octets[:, 1::2] << 4
    return np.ascontiguousarray(octets).view("<i4").astype(np.int32, copy=False)


def _state(shape: Shape, coding: Coding, dtype: str) -> np.ndarray:
    """bitsandbytes' QuantState: JSON as bytes, whose number leaves the tensors after it aligned."""
    text = json.dumps({"quant_type": "nf4", "blocksize": coding.group, "dtype": dtype, "shape": [*shape]})
    return np.frombuffer((text + " " * (-len(text) % 8)).encode(), np.uint8)
