"""`config.json` and `DecoderConfig`: both styles of rotary settings, defaults, windows, and what is refused."""

import dataclasses
import json
import re

import pytest

import nnx
from nnx.models.families.families import FAMILIES, config_from_dict, config_to_dict
from nnx.models.family import Family
from nnx.models.layer_spec import Stack
from tests.models.published import GOLDENS, golden_config, golden_directory, golden_model, tiny_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def read(**changes):
    return config_from_dict({**LLAMA, **changes})


@pytest.mark.parametrize("name", GOLDENS)
def test_a_config_survives_being_written(name):
    config = golden_config(name)
    fields = config_to_dict(config)
    assert config_from_dict(json.loads(json.dumps(fields))) == config
    assert hash(config) == hash(golden_config(name))
    original = json.loads((golden_directory(name) / "config.json").read_text())
    assert fields["architectures"] == original["architectures"]
    assert fields["bos_token_id"] == 1 and fields["initializer_range"] == original["initializer_range"]


def test_a_field_is_set_in_one_way_only():
    llama = FAMILIES["llama"]
    for twice in ({"constants": {"features": 8}}, {"defaults": {"sliding_window": 8}}, {"constants": {"widgets": 8}}):
        with pytest.raises(ValueError, match=r"Family.'mine'.: the field '(features|sliding_window|widgets)' must be"):
            Family("mine", "Mine", llama.table, llama.keys, **twice)


@pytest.mark.parametrize("name", GOLDENS)
def test_every_parameter_is_in_the_table_of_its_family_once(name):
    model = golden_model(name)
    table = FAMILIES[model.config.model_type].table_of(model.config)
    listed = [path for entry in (*table.body, *table.head) for path in entry.paths]
    assert len(listed) == len(set(listed))
    # A family whose layers differ in the names of their tensors has a table with the numbers of the layers.
    spelled = [{path, re.sub(r"^layers/\d+", "layers/{}", path)} for path in model.filter(nnx.Param)]
    assert all(len(names.intersection(listed)) == 1 for names in spelled)


def test_entries_that_follow_from_others_may_be_absent_or_null():
    for fields in ({}, {"num_key_value_heads": None, "head_dim": None}):
        config = read(**fields)
        assert (config.num_kv_heads, config.head_dim) == (4, 4)
        assert (config.norm_epsilon, config.activation, config.tie_embeddings) == (1e-6, "silu", False)
        assert config.rotary == nnx.models.RotaryConfig(10000.0)


def test_gpt2_has_four_times_as_many_hidden_features_unless_told():
    fields = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    assert config_from_dict(fields).hidden_features == 32
    assert config_from_dict({**fields, "n_inner": 12}).hidden_features == 12


class TestRotary:
    SCALINGS = {
        "linear": ({"factor": 4.0}, nnx.LinearScaling(4.0)),
        "llama3": (
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            nnx.Llama3Scaling(8.0, 1.0, 4.0, 32),
        ),
        "yarn": ({"factor": 2.0, "beta_fast": 16}, nnx.YaRNScaling(2.0, 64, beta_fast=16)),
        "dynamic": ({"factor": 2.0}, nnx.DynamicNTKScaling(2.0, 64)),
        "longrope": (
            {"short_factor": [1.0, 1.5], "long_factor": [2, 4], "original_max_position_embeddings": 16},
            nnx.LongRoPEScaling((1.0, 1.5), (2, 4), 16, factor=4.0),
        ),
    }

    @pytest.mark.parametrize("kind", SCALINGS)
    def test_older_and_newer_styles_mean_the_same(self, kind):
        settings, scaling = self.SCALINGS[kind]
        expected = nnx.models.RotaryConfig(500.0, scaling)
        assert read(rope_theta=500.0, rope_scaling={"type": kind, **settings}).rotary == expected
        assert read(rope_theta=500.0, rope_scaling={"rope_type": kind, **settings}).rotary == expected
        newer = read(rope_parameters={"rope_theta": 500.0, "rope_type": kind, **settings})
        assert newer.rotary == expected
        assert config_from_dict(config_to_dict(newer)) == newer

    def test_local_layers_have_their_own_base_and_no_scaling(self):
        gemma = {**LLAMA, "model_type": "gemma3_text", "head_dim": 4}
        scaled = {"rope_type": "linear", "factor": 8.0}
        older = config_from_dict({**gemma, "rope_theta": 5.0, "rope_local_base_freq": 3.0, "rope_scaling": scaled})
        assert older.rotary == nnx.models.RotaryConfig(5.0, nnx.LinearScaling(8.0))
        assert older.local_rotary == nnx.models.RotaryConfig(3.0)
        parameters = {
            "full_attention": {"rope_theta": 5.0, **scaled},
            "sliding_attention": {"rope_theta": 3.0, "rope_type": "default"},
        }
        assert config_from_dict({**gemma, "rope_parameters": parameters}) == older
        defaults = config_from_dict(gemma)
        assert (defaults.rotary.base, defaults.local_rotary.base) == (1e6, 1e4)

    @pytest.mark.parametrize("kind", ["longrope", "su"])
    def test_a_long_phi3_is_read_and_written_as_published(self, kind):
        scaling = {"type": kind, "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
        phi = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 16, "rope_scaling": scaling}
        config = config_from_dict(phi)
        assert config.rotary.scaling == nnx.LongRoPEScaling((1.0, 1.5), (2.0, 4.0), 16, factor=4.0)
        written = config_to_dict(config)
        assert written["rope_scaling"] == {**scaling, "type": "longrope"}
        assert written["original_max_position_embeddings"] == 16
        assert config_from_dict(written) == config
        # What a phi3 means that does not say how long its training texts were.
        del phi["original_max_position_embeddings"]
        assert config_from_dict(phi).rotary.scaling.original_max_length == 4096

    def test_factors_must_fit_the_heads(self):
        scaling = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
        with pytest.raises(ValueError, match="expected 2 numbers in short_factors, .* got 3"):
            nnx.models.Decoder(read(rope_scaling=scaling), ctx=nnx.context(0))
        with pytest.raises(ValueError, match="expected 'long_factor' in the rotary settings to be a list of numbers"):
            read(rope_scaling={**scaling, "long_factor": 2.0})
        with pytest.raises(ValueError, match="needs the entry 'short_factor'"):
            read(rope_scaling={"rope_type": "longrope", "long_factor": [2.0, 2.0]})

    def test_a_dynamic_scaling_begins_at_the_context_length(self):
        config = read(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
        other = nnx.models.RotaryConfig(scaling=nnx.DynamicNTKScaling(2.0, 32))
        with pytest.raises(ValueError, match="rotary"):
            config_to_dict(config.replace(rotary=other))

    def test_heads_that_rotate_whole_are_written_where_an_absent_entry_means_a_part(self):
        for name in ("phi", "gpt_neox", "glm"):
            config = golden_config(name)
            whole = config.replace(rotary=dataclasses.replace(config.rotary, fraction=1.0))
            assert config_from_dict(config_to_dict(whole)) == whole

    def test_a_part_of_a_head_can_rotate(self):
        phi = {**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.5}
        config = config_from_dict(phi)
        assert config.rotary.fraction == 0.5
        assert nnx.models.Decoder(config, ctx=nnx.context(0)).layers[0].attention.rotary.rotary_dim == 2
        assert config_from_dict(config_to_dict(config)) == config

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                {"rope_type": "mrope"},
                "'mrope' is not among the known ones: default, linear, dynamic, llama3, yarn, longrope",
            ),
            ({"rope_type": "linear"}, "'linear' needs the entry 'factor'"),
            ({"rope_type": "linear", "factor": "much"}, "'factor' in the rotary settings to be a number, got 'much'"),
            ({"rope_type": "yarn", "factor": 2.0, "slope": 0.7}, "slope=0.7 is not supported"),
            (3, "'rope_scaling' in the rotary settings"),
        ],
    )
    def test_scalings_that_cannot_be_computed_are_refused(self, settings, message):
        with pytest.raises(ValueError, match=message):
            read(rope_scaling=settings)


class TestWindows:
    def types(self, model_type, **changes):
        config = config_from_dict({**LLAMA, "model_type": model_type, "head_dim": 4, **changes})
        return "".join(kind[0] for kind in config.layer_types), config.sliding_window

    def test_each_family_has_its_own_rule(self):
        with pytest.raises(
            ValueError, match="llama models here do not have what.*\n  sliding_window=3: sliding windows"
        ):
            self.types("llama", sliding_window=3)
        assert self.types("mistral", sliding_window=3) == ("ssss", 3)
        assert self.types("mistral", sliding_window=None) == ("ffff", None)
        assert self.types("mistral") == ("ssss", 4096)
        assert self.types("phi3", sliding_window=3) == ("ssss", 3)
        assert self.types("phi3") == ("ffff", None)
        assert self.types("qwen2", sliding_window=3) == ("ffff", None)
        windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
        assert self.types("qwen2", **windows) == self.types("qwen3", **windows) == ("ffss", 3)
        assert self.types("gemma2", sliding_window=3) == ("sfsf", 3)
        assert self.types("gemma3_text", sliding_window=3, sliding_window_pattern=3) == ("ssfs", 3)
        assert self.types("gemma3_text", sliding_window=3) == ("ssss", 3)

    def test_a_list_of_layer_types_overrides_the_rule(self):
        listed = ["full_attention", "sliding_attention"] * 2
        assert self.types("gemma2", sliding_window=3, layer_types=listed) == ("fsfs", 3)
        with pytest.raises(ValueError, match="'full_attention' and 'sliding_attention', got"):
            self.types("gemma2", layer_types=["chunked_attention"] * 4)
        with pytest.raises(ValueError, match="a list of 4 entries"):
            self.types("gemma2", layer_types=["full_attention"])

    def test_a_window_must_be_positive(self):
        with pytest.raises(ValueError, match="'sliding_window' to be a positive integer or null, got 0"):
            self.types("mistral", sliding_window=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "'bert' is not among the known ones: .*gpt2, .*llama, .*mistral, .*phi3"),
        ({"model_type": None}, "None is not among the known ones"),
        ({"model_type": ["llama"]}, "is not among the known ones"),
        ({"hidden_size": None}, "'hidden_size', which a llama model needs, is missing"),
        ({"intermediate_size": None}, "'intermediate_size', which a llama model needs, is missing"),
        ({"hidden_size": "16"}, "'hidden_size' to be a positive integer, got '16'"),
        ({"num_hidden_layers": -1}, "'num_hidden_layers' to be a positive integer, got -1"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' to be a number, got 'small'"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' to be true or false, got 1"),
        ({"hidden_act": 3}, "'hidden_act' to be a name, got 3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized .gptq., which cannot be read"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
    ],
)
def test_configs_that_cannot_be_used_say_why(changes, message):
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read(**changes)


def test_a_config_that_the_file_cannot_express_is_not_written():
    for changes in ({"scale_embeddings": True}, {"rotary": nnx.models.RotaryConfig(scaling=nnx.NTKScaling(2.0))}):
        with pytest.raises(ValueError, match=f"llama config.json cannot express {next(iter(changes))}="):
            config_to_dict(read().replace(**changes))


def test_a_config_made_by_hand_has_no_special_tokens():
    config = read(model_type="phi3")
    fields = config_to_dict(config)
    assert [fields[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None, None, None]
    assert config_from_dict(fields) == config
    assert config_to_dict(read(eos_token_id=3))["eos_token_id"] == 3


def test_the_end_of_a_text_can_be_one_token_or_several():
    assert read().stop_tokens == read(eos_token_id=None).stop_tokens == ()
    assert read(eos_token_id=7).stop_tokens == (7,)
    assert read(eos_token_id=[7, 9]).stop_tokens == (7, 9)


def test_a_family_without_experts_cannot_express_them():
    with pytest.raises(ValueError, match="A llama config.json cannot express num_experts=4"):
        config_to_dict(tiny_config(num_experts=4, num_selected=2))


def test_either_name_of_the_number_of_experts_is_read():
    fields = json.loads((golden_directory("qwen3_moe") / "config.json").read_text())
    count = fields.pop("num_local_experts", None) or fields.pop("num_experts")
    found = [config_from_dict({**fields, key: count}) for key in ("num_experts", "num_local_experts")]
    assert found[0] == found[1] and found[0].num_experts == 6
    assert "num_local_experts" not in config_to_dict(found[1])


class TestGptOss:
    @staticmethod
    def fields(**changes):
        found = {**json.loads((golden_directory("gpt_oss") / "config.json").read_text()), **changes}
        return {key: value for key, value in found.items() if value is not ...}

    def test_a_file_that_mentions_no_rotary_scaling_means_that_of_the_published_models(self):
        scaling = nnx.YaRNScaling(32.0, 4096, 32.0, 1.0, truncate=False)
        for changes in ({"rope_theta": ...}, {"rope_theta": 150_000.0}, {"rope_parameters": None}):
            config = config_from_dict(self.fields(rope_scaling=..., **{"rope_theta": ..., **changes}))
            assert config.rotary == nnx.models.RotaryConfig(150_000.0, scaling)
            assert config_from_dict(config_to_dict(config)) == config
        plain = config_from_dict(
            self.fields(rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 9.0})
        )
        assert plain.rotary == nnx.models.RotaryConfig(9.0)
        assert config_from_dict(config_to_dict(plain)) == plain

    def test_yarn_ramp_is_rounded_by_default(self):
        yarn = {"rope_type": "yarn", "factor": 4.0}
        rounded, exact = (
            config_from_dict(self.fields(rope_scaling={**yarn, **more})) for more in ({}, {"truncate": False})
        )
        assert rounded.rotary.scaling.truncate and not exact.rotary.scaling.truncate
        assert "truncate" not in config_to_dict(rounded)["rope_scaling"]
        assert config_to_dict(exact)["rope_scaling"]["truncate"] is False
        with pytest.raises(ValueError, match="'truncate' in the rotary settings to be true or false, got 0"):
            config_from_dict(self.fields(rope_scaling={**yarn, "truncate": 0}))

    def test_absent_entries_have_the_values_of_the_published_models(self):
        absent = ("attention_bias", "swiglu_limit", "swiglu_alpha", "sliding_window", "num_local_experts", "head_dim")
        config = config_from_dict(self.fields(**dict.fromkeys(absent, ...)))
        assert config.use_qkv_bias and config.use_out_bias and config.use_sinks and config.use_router_bias
        assert (config.swiglu_limit, config.swiglu_alpha) == (7.0, 1.702)
        assert (config.num_experts, config.head_dim, config.sliding_window) == (128, 64, 128)
        assert config.layer_types == ("sliding", "full", "sliding")

    def test_either_name_of_the_number_of_selected_experts_is_read(self):
        config = config_from_dict(self.fields(num_experts_per_tok=..., experts_per_token=3))
        assert config.num_selected == 3 and "experts_per_token" not in config_to_dict(config)
        assert config_from_dict(self.fields(num_experts_per_tok=2, experts_per_token=3)).num_selected == 2

    def test_other_families_cannot_express_sinks(self):
        with pytest.raises(ValueError, match="A llama config.json cannot express use_sinks=True"):
            config_to_dict(tiny_config(use_sinks=True))
        with pytest.raises(ValueError, match="A gpt_oss config.json cannot express use_sinks=False"):
            config_to_dict(golden_config("gpt_oss").replace(use_sinks=False))

    def test_a_bound_of_gates_needs_gates(self):
        with pytest.raises(ValueError, match="swiglu_limit=7.0 is about gates, which MLPs with gated=False"):
            tiny_config(swiglu_limit=7.0, gated=False)
        with pytest.raises(ValueError, match="GatedMLP: `gated_activation` replaces `activation`"):
            nnx.models.Decoder(tiny_config(swiglu_limit=7.0, activation="relu"), ctx=nnx.context(0))


def test_modernbert_is_read_as_first_published():
    golden = json.loads((golden_directory("modernbert") / "config.json").read_text())
    older = {"global_rope_theta": 160000.0, "local_rope_theta": 100.0, "global_attn_every_n_layers": 3}
    first = {name: entry for name, entry in golden.items() if name not in ("rope_parameters", "layer_types")} | older
    config = config_from_dict(first)
    assert config.replace(extra=()) == golden_config("modernbert").replace(extra=())
    assert [layer.window for layer in config.layers] == [None, 6, 6, None, 6, 6, None]  # five tokens on each side
    assert [layer.mixer_norm for layer in config.layers] == [False] + 6 * [True]
    assert config.stack == Stack(lead=1, period=3, count=2)
    for changes in ({"rope_theta": 500.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            config_from_dict({**first, **changes})
