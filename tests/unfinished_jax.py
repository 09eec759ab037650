"""Tests that JAX 0.10 fails under its experimental settings, and why; docs/versions.md has each in plain JAX."""

import os

import jax

_SORTS = ("int", "float", "-0", "bool", "array")
_WITH_EXPERTS = ("deepseek_v", "glm4_moe_lite", "gpt_oss", "llama4", "mixtral", "qwen3_moe", "qwen3_next")
_SHARED_TRACES = (
    "class_forms_of_equal_structure_are_traced_once",
    "layers_of_other_structure_or_shape_have_their_own_trace",
    "calls_from_plain_python_share_a_trace_as_well",
    "a_global_that_a_body_names_is_part_of_the_trace",
    "a_context_variable_is_part_of_the_trace",
    "a_captured_weight_that_changes_between_two_layers_is_traced_again",
    "a_body_that_reaches_something_mutable_is_traced_each_time",
    "each_call_draws_its_own_random_numbers",
)

UNFINISHED = {
    "JAX_CUSTOM_VJP3": {
        "a rule with nondiff_argnums and symbolic_zeros gets objects in place of the former": (
            "test_linear_cross_entropy.py::test_loss_and_gradients_are_those_of_the_plain_form",
            "test_linear_cross_entropy.py::test_only_the_gradients_that_are_asked_for_are_computed",
            "test_linear_cross_entropy.py::test_positions_that_do_not_count_change_nothing_even_if_they_are_nan",
            "test_linear_cross_entropy.py::test_bfloat16_sums_the_gradient_of_the_kernel_in_float32",
            "test_linear_cross_entropy.py::test_memory_stays_below_the_logits",
        ),
        "jax.checkpoint of a rule with nondiff_argnums raises": (
            "test_custom.py::test_a_module_without_gradient_can_be_used_in_the_rule[make_nondiff_vjp-grad of remat]",
            "test_grouped_kernel.py::test_scanned_layers_can_be_differentiated_with_the_kernel",
        ),
        "the program of a rule is in no jaxpr": (
            "test_grouped_kernel.py::test_the_layer_computes_the_same_with_the_kernel",
            "test_captured_weights.py::test_a_derivative_rule_reads_current_weights_in_a_gradient_of_a_compiled_function",
        ),
    },
    "JAX_REMAT3": {
        "a function that raised while it was traced is traced in every call": (
            "test_common.py::test_lifted_transforms_nest_in_a_lifted_jit[remat]",
            "test_eager_traces.py::test_a_repeated_call_is_not_traced_again[remat]",
            "test_eager_traces.py::test_another_model_of_the_same_structure_uses_the_same_trace[remat]",
            *(f"test_eager_traces.py::test_a_changed_closure_cell_is_seen[{sort}-remat]" for sort in _SORTS),
            *(f"test_shared_traces.py::test_{name}" for name in _SHARED_TRACES),
            "test_activation_names.py::test_the_same_names_share_a_trace",
            "test_moe.py::test_changing_dtypes_leaves_the_losses_alone",
            *(f"test_goldens.py::test_greedy_tokens_through_the_cache_are_identical[{name}" for name in _WITH_EXPERTS),
        ),
        "the gradient of jax.checkpoint of a scan with unused outputs raises": (
            "test_scan.py::test_gradients_agree_with_and_without_remat[remat of scan]",
        ),
        "checkpoint_name cannot be mapped": ("test_registry.py::test_vmap_gives_what_a_loop_gives[MoE",),
        "prevent_cse, names and kernels are in no jaxpr": (
            "test_remat.py::test_policy_and_prevent_cse_are_passed_on",
            "test_activation_names.py::test_activations_have_names_inside_remat_only",
            "test_activation_names.py::test_a_function_that_ran_without_remat_before_has_names_inside_it",
            "test_attention.py::TestImplementation::test_odd_lengths_are_differentiated_without_the_fused_kernel",
            "test_decoder.py::test_recomputing_layers_changes_no_gradient",
        ),
    },
}


def why_not(test: str) -> str | None:
    """Returns why a test, given by its id, cannot pass with this version and these settings of JAX; None if it can."""
    if jax.__version_info__ >= (0, 11):
        return None
    for setting, reasons in UNFINISHED.items():
        for reason, tests in reasons.items():
            if os.environ.get(setting, "0") not in ("", "0") and any(f"/{start}" in test for start in tests):
                return f"{setting} is unfinished in JAX 0.10: {reason}"
    return None
