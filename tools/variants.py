"""Configurations of the families that have no function of their own in `parity`: which entries matter, and some values.

The first value of an entry is that of the family's golden; `parity` draws one of them at random. Sizes are those that
most families share, see `parity.sizes`.
"""

from typing import Any

FLAGS = [True, False]
FULL, SLIDING = "full_attention", "sliding_attention"
ONES = [0.5, 1.0]  # parts of heads that rotate

EXPERTS = {"num_experts": [4, 6], "num_experts_per_tok": [2, 3]}
MOE = {"moe_intermediate_size": [20, 24]}
GROUPS = {"n_group": [2, 1], "topk_group": [1], "routed_scaling_factor": [1.8, 2.5]}
ROUTED = {
    **{**MOE, **GROUPS, "n_routed_experts": [4, 8], "num_experts_per_tok": [2], "n_shared_experts": [1, 2]},
    "norm_topk_prob": FLAGS,
}
MULTIPLIERS = {
    **{"embedding_multiplier": [1.5, 12.0], "residual_multiplier": [0.4, 0.22], "logits_scaling": [0.7, 8.0]},
    **{"attention_multiplier": [0.3, 0.015625], "attention_bias": FLAGS},
}

VARIANTS: dict[str, dict[str, list[Any]]] = {
    "gemma": {"head_dim": [12, 16], "attention_bias": [False, True]},
    "olmo": {"attention_bias": FLAGS, "tie_word_embeddings": [False, True]},
    "olmo2": {"attention_bias": [False, True]},
    "olmo3": {"sliding_window": [6, 9], "layer_types": [[SLIDING, FULL], [FULL, SLIDING]]},
    "smollm3": {"no_rope_layers": [[1, 0], [0, 1]], "attention_bias": FLAGS, "mlp_bias": [False, True]},
    "granite": {**MULTIPLIERS, "mlp_bias": FLAGS},
    "glm": {"head_dim": [12, 16], "attention_bias": FLAGS, "partial_rotary_factor": [0.5]},
    "glm4": {"head_dim": [12, 16], "attention_bias": FLAGS, "partial_rotary_factor": [0.5]},
    "seed_oss": {"head_dim": [12, 16], "attention_bias": FLAGS, "attention_out_bias": FLAGS, "mlp_bias": FLAGS},
    "starcoder2": {"use_bias": FLAGS, "sliding_window": [6, None], "norm_epsilon": [1e-5, 1e-6]},
    "exaone4": {"sliding_window": [6, None], "layer_types": [[SLIDING, FULL]], "sliding_window_pattern": [2]},
    "ernie4_5": {"head_dim": [12, 16], "use_bias": FLAGS, "tie_word_embeddings": FLAGS},
    "phi": {"partial_rotary_factor": ONES, "tie_word_embeddings": [False]},
    "cohere": {"use_qk_norm": FLAGS, "attention_bias": [False, True], "logit_scale": [0.5, 0.0625]},
    "cohere2": {"sliding_window": [6], "layer_types": [[SLIDING, FULL]], "head_dim": [12, 16], "logit_scale": [0.5]},
    "stablelm": {"use_parallel_residual": FLAGS, "use_qkv_bias": FLAGS, "partial_rotary_factor": [0.25, 0.5]},
    "nemotron": {"head_dim": [12, 16], "partial_rotary_factor": ONES, "attention_bias": FLAGS, "mlp_bias": FLAGS},
    "arcee": {"head_dim": [12, 16], "attention_bias": FLAGS, "mlp_bias": FLAGS},
    "hunyuan_v1_dense": {"head_dim": [12, 16], "attention_bias": [False, True]},
    "ministral": {"head_dim": [12], "sliding_window": [6, 9], "layer_types": [[SLIDING, FULL], [SLIDING, SLIDING]]},
    "helium": {"head_dim": [8], "attention_bias": [False], "mlp_bias": FLAGS},
    "gpt_neox": {"use_parallel_residual": FLAGS, "attention_bias": FLAGS, "partial_rotary_factor": [0.25, 1.0]},
    "falcon": {
        **{"new_decoder_architecture": FLAGS, "multi_query": FLAGS, "parallel_attn": FLAGS, "bias": FLAGS},
        **{"num_kv_heads": [2], "ffn_hidden_size": [48], "tie_word_embeddings": FLAGS},
    },
    "eurobert": {"tie_word_embeddings": [False], "attention_bias": FLAGS, "mlp_bias": FLAGS},
    "modernbert": {
        **{
            "num_hidden_layers": [7, 4],
            "num_key_value_heads": [4],
            "local_attention": [10, 5],
            "global_attn_every_n_layers": [3, 2],
        },
        **{"attention_bias": [False, True], "mlp_bias": [False, True], "norm_bias": [False, True]},
        **{"global_rope_theta": [160_000.0, 500.0], "local_rope_theta": [100.0, 10_000.0]},
        **{"classifier_activation": ["silu", "gelu"], "norm_eps": [1e-5, 1e-3], "tie_word_embeddings": [True]},
    },
    "llama4_text": {
        **{"num_hidden_layers": [2, 4], "head_dim": [8, 12], "intermediate_size_mlp": [24, 40], "hidden_size": [32]},
        **{"num_local_experts": [4, 6], "num_experts_per_tok": [1, 2], "interleave_moe_layer_step": [2, 1]},
        **{"no_rope_layer_interval": [2, 3], "attention_chunk_size": [7, 5], "floor_scale": [6, 3]},
        **{"use_qk_norm": FLAGS, "attn_temperature_tuning": FLAGS, "attn_scale": [0.7, 0.1]},
        "attention_bias": [False, True],
    },
    "qwen2_moe": {**EXPERTS, **MOE, "shared_expert_intermediate_size": [24], "norm_topk_prob": FLAGS},
    "olmoe": {**EXPERTS, "norm_topk_prob": FLAGS},
    "flex_olmo": {**EXPERTS, "norm_topk_prob": FLAGS},
    "glm4_moe": {**ROUTED, "first_k_dense_replace": [1, 0], "use_qk_norm": FLAGS, "attention_bias": FLAGS},
    "solar_open": {**ROUTED, "head_dim": [8, 12], "attention_bias": [False]},
    "exaone_moe": {
        **{**EXPERTS, **MOE, **GROUPS, "mlp_layer_types": [["dense", "sparse"], ["sparse", "sparse"]]},
        **{"num_shared_experts": [1, 2], "sliding_window": [6], "layer_types": [[SLIDING, FULL]]},
        "first_k_dense_replace": [1],
    },
    "ernie4_5_moe": {
        **{**MOE, "moe_num_experts": [4, 6], "moe_k": [2], "moe_num_shared_experts": [1, 2]},
        **{"moe_layer_start_index": [1, 0], "moe_layer_end_index": [1]},
    },
    "minimax_m2": {"num_local_experts": [4, 6], "num_experts_per_tok": [2, 3], "head_dim": [12, 16]},
    "hy_v3": {
        **{**EXPERTS, **MOE, "mlp_layer_types": [["dense", "sparse"], ["sparse", "sparse"]], "head_dim": [8]},
        **{"num_shared_experts": [1, 2]},
    },
    "granitemoe": {"num_local_experts": [4], "num_experts_per_tok": [2], **MULTIPLIERS},
    "granitemoeshared": {
        **{"num_local_experts": [4], "num_experts_per_tok": [2], "shared_intermediate_size": [24, 0]},
        **MULTIPLIERS,
    },
}
