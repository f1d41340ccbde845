"""A table per family of models; a new family is a file here, and its name in ARCHITECTURES."""

from spmd_lm.huggingface.families.bert import BERT, BERT_POOLED, BERT_SPAN
from spmd_lm.huggingface.families.gemma import GEMMA2, GEMMA3
from spmd_lm.huggingface.families.gpt2 import GPT2
from spmd_lm.huggingface.families.llama import LLAMA
from spmd_lm.huggingface.families.mistral import MISTRAL
from spmd_lm.huggingface.families.mixtral import MIXTRAL
from spmd_lm.huggingface.families.neox import NEOX
from spmd_lm.huggingface.families.phi import PHI3
from spmd_lm.huggingface.families.qwen import QWEN2, QWEN3
from spmd_lm.huggingface.families.qwen_moe import QWEN2_MOE, QWEN3_MOE

ARCHITECTURES = (
    *(GPT2, BERT, BERT_POOLED, BERT_SPAN, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, NEOX, PHI3),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE),
)
MODEL_TYPES = {each.model_type: each for each in ARCHITECTURES if each not in (BERT_POOLED, BERT_SPAN)}
"""Architectures by the name in config.json; for BERT, the pretraining one."""
CLASSES = {name: architecture for architecture in ARCHITECTURES for name in architecture.classes}
