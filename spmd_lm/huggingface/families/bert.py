"""BERT and its heads (modeling_bert.py of transformers 5.23)."""

from dataclasses import replace

from spmd_lm.huggingface.architectures import GELU_NAMES, Architecture, ConfigKey, WeightMapping, linear, norm

BERT_LAYER = "bert.encoder.layer.{layer}"
BERT_ENCODER = (
    WeightMapping("embedding.tokens", "bert.embeddings.word_embeddings.weight"),
    WeightMapping("embedding.positions", "bert.embeddings.position_embeddings.weight"),
    WeightMapping("embedding.types", "bert.embeddings.token_type_embeddings.weight"),
    *norm("embedding.norm", "bert.embeddings.LayerNorm"),
    *linear("blocks.attention.query", f"{BERT_LAYER}.attention.self.query", transposed=True),
    *linear("blocks.attention.key", f"{BERT_LAYER}.attention.self.key", transposed=True),
    *linear("blocks.attention.value", f"{BERT_LAYER}.attention.self.value", transposed=True),
    *linear("blocks.attention.out", f"{BERT_LAYER}.attention.output.dense"),
    *norm("blocks.norm1", f"{BERT_LAYER}.attention.output.LayerNorm"),
    *linear("blocks.mlp.up", f"{BERT_LAYER}.intermediate.dense", transposed=True),
    *linear("blocks.mlp.down", f"{BERT_LAYER}.output.dense"),
    *norm("blocks.norm2", f"{BERT_LAYER}.output.LayerNorm"),
)
BERT_POOLER = linear("head.pooler", "bert.pooler.dense", transposed=True)
BERT = Architecture(
    model_type="bert",
    classes={
        "BertForPreTraining": {"kind": "masked_lm", "sentence_order": True},
        "BertForMaskedLM": {"kind": "masked_lm", "sentence_order": False},
    },
    weights=(
        *BERT_ENCODER,
        *BERT_POOLER,
        *linear("head.transform", "cls.predictions.transform.dense", transposed=True),
        *norm("head.transform_norm", "cls.predictions.transform.LayerNorm"),
        WeightMapping("head.output_bias", "cls.predictions.bias"),
        *linear("head.binary", "cls.seq_relationship", transposed=True),
    ),
    config_keys=(
        ConfigKey("vocab_size", "vocab", 30522),
        ConfigKey("max_position_embeddings", "context", 512),
        ConfigKey("hidden_size", "width", 768),
        ConfigKey("num_hidden_layers", "layers", 12),
        ConfigKey("num_attention_heads", "heads", 12),
        ConfigKey("intermediate_size", "mlp_width", 3072),
        ConfigKey("type_vocab_size", "token_types", 2),
        ConfigKey("hidden_act", "activation", "gelu", GELU_NAMES),
        ConfigKey("hidden_dropout_prob", "dropout", 0.1),
        ConfigKey("attention_probs_dropout_prob", "attention_dropout", 0.1),
        ConfigKey("layer_norm_eps", "norm_eps", 1e-12),
    ),
    fixed={"kind": "bert", "norm": "post", "tie_embeddings": True},
    # An untied model has a second bias in place of cls.predictions.bias.
    required={"tie_word_embeddings": True, "position_embedding_type": "absolute", "is_decoder": False}
    | {"add_cross_attention": False},
    legacy_names={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    | {"cls.predictions.bias": "cls.predictions.decoder.bias"},
    buffers=("bert.embeddings.position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
)
BERT_POOLED = replace(
    BERT,
    classes={"BertForSequenceClassification": {"kind": "classification"}}
    | {"BertForMultipleChoice": {"kind": "multiple_choice"}},
    weights=(*BERT_ENCODER, *BERT_POOLER, *linear("head.output", "classifier", transposed=True)),
)
BERT_SPAN = replace(
    BERT,
    classes={"BertForQuestionAnswering": {"kind": "span"}},
    weights=(*BERT_ENCODER, *linear("head.output", "qa_outputs", transposed=True)),
)
