"""The private names of jax that operations use, and why no public one would do."""

from jax._src.cudnn import fused_attention_stablehlo as _cudnn

AttentionLayout, MaskType = _cudnn.AttentionLayout, _cudnn.MaskType

cudnn_attention_backward = _cudnn._dot_product_attention_bwd_rule
"""cuDNN's backward pass from given results; the public function's is from the results of its own keys alone."""
