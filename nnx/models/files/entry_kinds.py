"""What the entries of a `config.json` are that a family does not read: neutral, or a feature that it does not have.

An entry is *neutral* if it changes nothing that a model computes: settings of training and of writing, names of
classes, notes of tools, and whatever is switched off. Any other entry that a family does not read is *not understood*.
A model with one is refused, because what it would compute here could be something else.
"""

from collections.abc import Mapping
from typing import Any

NOT_UNDERSTOOD = (
    "{where}: {family} models here do not have what these entries ask for:\n{entries}\n`nnx.models.explain(directory)` "
    "goes through all entries. If you know that these change nothing, leave them out: "
    "`nnx.models.from_pretrained(directory, ignore_entries={names!r})`."
)
UNKNOWN = "an entry that no family here reads"

_TRAINING = {
    *("activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout"),
    *("decoder_layerdrop", "dropout", "dropout_rate", "embd_pdrop", "embedding_dropout", "encoder_layerdrop"),
    *("hidden_dropout", "hidden_dropout_prob", "layerdrop", "resid_pdrop", "resid_dropout", "summary_first_dropout"),
    *("ffn_dropout", "mlp_dropout", "output_dropout", "embed_dropout", "expert_dropout", "token_dropout"),
    *("init_std", "initializer_factor", "initializer_range", "logit_scale_init_value", "initializer_cutoff_factor"),
    *("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "ep_size"),
    *("apply_spec_augment", "mask_feature_length", "mask_feature_min_masks", "mask_feature_prob", "mask_time_length"),
    *("mask_time_min_masks", "mask_time_prob", "gradient_checkpointing", "use_bfloat16", "pretraining_tp"),
    *("num_nextn_predict_layers",),  # more layers, which transformers does not read either
}
_WRITING = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "bad_words_ids", "do_sample", "early_stopping", "temperature", "top_k", "top_p"),
    *("min_p", "typical_p", "max_length", "min_length", "max_new_tokens", "num_beams", "num_beam_groups"),
    *("num_return_sequences", "length_penalty", "repetition_penalty", "no_repeat_ngram_size", "diversity_penalty"),
    *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "remove_invalid_values", "use_cache"),
    *("cache_implementation", "return_dict_in_generate", "output_scores", "task_specific_params", "prefix"),
}
_BOOKKEEPING = {
    *("auto_map", "tokenizer_class", "return_dict", "output_attentions", "output_hidden_states", "torchscript"),
    *("output_router_logits", "problem_type", "finetuning_task", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "num_labels", "classifier_proj_size", "classifier_activation", "classifier_pooling"),
    *("summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj", "pruned_heads"),
    *("out_features", "out_indices", "stage_names", "encoder_stride", "median_filter_width", "use_weighted_layer_sum"),
    *("dense_act_fn", "is_gated_act", "reorder_and_upcast_attn", "attn_implementation", "experts_implementation"),
    *("transformers.js_config", "unsloth_fixed", "unsloth_version", "model_max_length", "model_name", "sentence_pad"),
    *("tie_encoder_decoder", "tf_legacy_loss", "scale_attn_by_inverse_layer_idx", "quantization", "is_causal"),
}
NEUTRAL = _TRAINING | _WRITING | _BOOKKEEPING
"""Entries that never matter, by name."""

FEATURES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "alibi": ("positions as biases of attention (ALiBi)", ()),
    "position_embedding_type": ("another kind of positions", ("absolute", "rope")),
    "attn_logit_softcapping": ("soft caps of the logits of attention", ()),
    "final_logit_softcapping": ("soft caps of the output", ()),
    "logit_softcapping": ("soft caps of the output", ()),
    "embedding_multiplier": ("a multiplier of embeddings", (1, 1.0)),
    "residual_multiplier": ("a multiplier of what layers add", (1, 1.0)),
    "attention_multiplier": ("a scale of attention", ()),
    "logits_scaling": ("a scale of the logits", (1, 1.0)),
    "logit_scale": ("a scale of the logits", (1, 1.0)),
    "attention_bias": ("biases of attention", ()),
    "qkv_bias": ("biases of attention", ()),
    "mlp_bias": ("biases of MLPs", ()),
    "use_qk_norm": ("norms of queries and keys", ()),
    "qk_layernorm": ("norms of queries and keys", ()),
    "use_parallel_residual": ("MLPs parallel to attention", ()),
    "parallel_attn": ("MLPs parallel to attention", ()),
    "sliding_window": ("sliding windows", ()),
    "use_sliding_window": ("sliding windows", ()),
    "layer_types": ("layers of several kinds", ()),
    "no_rope_layers": ("layers without a rotary embedding", ()),
    "no_rope_layer_interval": ("layers without a rotary embedding", ()),
    "partial_rotary_factor": ("rotary embeddings of a part of each head", (1, 1.0)),
    "rope_scaling": ("rotary embeddings", ()),
    "rope_parameters": ("rotary embeddings", ()),
    "rope_theta": ("rotary embeddings", ()),
    "head_dim": ("heads of another width", ()),
    "num_key_value_heads": ("several heads that share a key", ()),
    "num_experts": ("mixtures of experts", (1,)),
    "num_local_experts": ("mixtures of experts", (1,)),
    "n_routed_experts": ("mixtures of experts", ()),
    "n_shared_experts": ("experts that every token uses", ()),
    "moe_intermediate_size": ("mixtures of experts", ()),
    "shared_expert_intermediate_size": ("experts that every token uses", ()),
    "routed_scaling_factor": ("a multiplier of experts", (1, 1.0)),
    "kv_lora_rank": ("latent attention", ()),
    "q_lora_rank": ("latent attention", ()),
    "linear_num_value_heads": ("gated delta networks", ()),
    "mamba_d_state": ("state spaces", ()),
    "state_size": ("state spaces", ()),
    "ssm_state_size": ("state spaces", ()),
    "vision_config": ("images", ()),
    "audio_config": ("sound", ()),
    "text_config": ("a model of several parts", ()),
    "use_bidirectional_attention": ("attention to later tokens", ()),
    "is_decoder": ("attention to earlier tokens only", ()),
    "add_cross_attention": ("attention to another text", ()),
}
"""Features by the entry that asks for them, with the values that ask for nothing."""


def missing_feature(name: str, entries: Mapping[str, Any]) -> str | None:
    """Returns what an entry that a family does not read asks for; None if it is neutral."""
    value = entries[name]
    if name in NEUTRAL or name.startswith("_") or _is_off(name, value, entries):
        return None
    if name in FEATURES:
        feature, neutral = FEATURES[name]
        return None if value in neutral else feature
    # Tools leave notes. What changes a model is a number, a flag or a list; the few names that do are known above.
    return None if isinstance(value, str) else UNKNOWN


def _is_off(name: str, value: Any, entries: Mapping[str, Any]) -> bool:
    """Whether a value asks for nothing: nothing at all, zero, or what would follow from other entries anyway."""
    if not value:
        return True
    if name == "head_dim":
        size, heads = entries.get("hidden_size"), entries.get("num_attention_heads")
        return isinstance(size, int) and isinstance(heads, int) and heads > 0 and value == size // heads
    if name == "num_key_value_heads":
        return value == entries.get("num_attention_heads")
    return name == "layer_types" and isinstance(value, list) and set(value) == {"full_attention"}


def check_understood(unread: list[str], entries: Mapping[str, Any], family: str, where: str) -> None:
    """Raises `ValueError` if entries that a family does not read would change its models.

    Args:
        unread: their names.
        entries: all entries of the file.
        family: the `model_type`.
        where: the name of the file, for the error.
    """
    missing = {name: missing_feature(name, entries) for name in unread}
    names = [name for name, feature in missing.items() if feature is not None]
    if names:
        lines = "\n".join(f"  {name}={entries[name]!r}: {missing[name]}" for name in names)
        raise ValueError(NOT_UNDERSTOOD.format(where=where, family=family, entries=lines, names=names))
