"""Loading and saving directories: round trips, dtypes, adaptations, and everything that can be wrong with them."""

import json
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models.published import (
    DIFFERENT,
    GOLDENS,
    edited,
    golden_config,
    golden_directory,
    golden_model,
    randomized,
    tiny_model,
    tokens_for,
)


@pytest.fixture
def directory(tmp_path):
    """A directory with a tiny llama in two shards."""
    nnx.models.save_pretrained(tiny_model(), tmp_path, max_shard_size=6000)
    return tmp_path


@pytest.fixture
def llama(tmp_path):
    """A copy of a golden, to be damaged."""
    return shutil.copytree(golden_directory("llama"), tmp_path / "llama")


def tensors(directory) -> dict[str, tuple]:
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= {name: (array.dtype, array.shape) for name, array in nnx.load_safetensors(path).items()}
    return found


def changed(directory, change) -> None:
    """Rewrites the tensors of a single file as `change` says."""
    arrays = {name: np.array(array) for name, array in nnx.load_safetensors(directory / "model.safetensors").items()}
    change(arrays)
    nnx.save_safetensors(directory / "model.safetensors", nnx.State(arrays))


def same_values(model, other) -> bool:
    """Whether two models have equal values; the names of axes may differ."""
    ours, theirs = model.get_state(), other.get_state()
    return list(ours) == list(theirs) and all(
        np.array_equal(ours[path].value, theirs[path].value) and ours[path].value.dtype == theirs[path].value.dtype
        for path in ours
    )


class TestRoundTrips:
    @pytest.mark.parametrize("name", GOLDENS)
    def test_saved_model_has_the_published_names_shapes_and_values(self, name, tmp_path):
        config, scan_layers = golden_config(name), name in DIFFERENT  # a scanned one is also read as a list
        model = randomized(nnx.models.Decoder(config, scan_layers=scan_layers, ctx=nnx.context(0)))
        nnx.models.save_pretrained(model, tmp_path)
        assert tensors(tmp_path) == tensors(golden_directory(name))
        again = nnx.models.from_pretrained(tmp_path, scan_layers=scan_layers)
        assert again.config == config
        assert again.get_state() == model.get_state()
        assert same_values(nnx.models.from_pretrained(tmp_path), model.unscanned())

    def test_large_models_are_saved_in_shards_with_an_index(self, directory):
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1
        assert not (directory / "model.safetensors").exists()
        assert nnx.models.from_pretrained(directory).get_state() == tiny_model().get_state()

    def test_other_files_in_the_directory_stay(self, directory):
        (directory / "tokenizer.json").write_text("{}")
        nnx.models.save_pretrained(tiny_model(seed=1), directory)
        assert (directory / "tokenizer.json").read_text() == "{}"
        assert sorted(path.name for path in directory.glob("*.safetensors")) == ["model.safetensors"]
        assert nnx.models.from_pretrained(directory).get_state() == tiny_model(seed=1).get_state()

    def test_tied_embeddings_are_stored_once_and_a_second_copy_is_ignored(self, tmp_path):
        model = tiny_model(tie_embeddings=True)
        nnx.models.save_pretrained(model, tmp_path)
        assert "lm_head.weight" not in tensors(tmp_path)
        changed(tmp_path, lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"]}))
        loaded = nnx.models.from_pretrained(tmp_path)
        assert loaded.head is None and loaded.get_state() == model.get_state()

    def test_names_without_their_prefix_and_buffers_are_understood(self, tmp_path):
        directory = shutil.copytree(golden_directory("gpt2"), tmp_path / "gpt2")

        def as_first_published(arrays):
            for name in list(arrays):
                arrays[name.removeprefix("transformer.")] = arrays.pop(name)
            arrays["h.0.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), np.float32))

        changed(directory, as_first_published)
        assert nnx.models.from_pretrained(directory).get_state() == golden_model("gpt2").get_state()

    def test_a_directory_may_contain_other_safetensors_files(self, llama):
        shutil.copy(llama / "model.safetensors", llama / "consolidated.safetensors")
        assert nnx.models.from_pretrained(llama).get_state() == golden_model("llama").get_state()


class TestDtypes:
    def test_parameters_keep_the_stored_dtype_by_default(self, tmp_path):
        model = randomized(nnx.models.Decoder(golden_config("llama"), param_dtype=jnp.bfloat16, ctx=nnx.context(0)))
        nnx.models.save_pretrained(model, tmp_path)
        loaded = nnx.models.from_pretrained(tmp_path)
        assert loaded.param_dtype == jnp.bfloat16
        assert loaded.get_state() == model.get_state()
        assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
        assert loaded(jnp.array([[1, 2]])).dtype == jnp.bfloat16

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16"])
    def test_parameters_are_converted_while_they_are_read(self, dtype):
        model = nnx.models.from_pretrained(golden_directory("llama"), dtype=dtype, scan_layers=True)
        expected = golden_model("llama").clone()
        expected.update_state(jax.tree.map(lambda x: x.astype(dtype), expected.get_state()))
        assert same_values(model.unscanned(), expected)
        built = nnx.models.Decoder(golden_config("llama"), param_dtype=dtype, scan_layers=True, ctx=nnx.context(0))
        assert model.get_module_def() == built.get_module_def()

    def test_integers_are_not_parameters(self):
        with pytest.raises(ValueError, match="floating-point numbers: .* got int8"):
            nnx.models.from_pretrained(golden_directory("llama"), dtype=jnp.int8)

    def test_quantized_tensors_are_refused_by_name(self, llama):
        changed(llama, lambda arrays: arrays.update({"model.norm.weight": np.ones(32, np.int8)}))
        with pytest.raises(nnx.CheckpointError, match="wrong dtype: model.norm.weight is int8, expected 16, 32"):
            nnx.models.from_pretrained(llama)


class TestAbstractModels:
    @pytest.mark.parametrize("scan_layers", [False, True], ids=["list", "scanned"])
    def test_abstract_model_is_the_shape_of_the_loaded_and_of_the_built_one(self, scan_layers):
        model = nnx.eval_shape(lambda: nnx.models.from_pretrained(golden_directory("llama"), scan_layers=scan_layers))
        again = nnx.models.from_pretrained(golden_directory("llama"), scan_layers=scan_layers, abstract=True)
        built = nnx.eval_shape(
            lambda: nnx.models.Decoder(golden_config("llama"), scan_layers=scan_layers, ctx=nnx.context(0))
        )
        assert again.get_state() == model.get_state() == built.get_state()
        assert model.config == golden_config("llama")

    def test_inside_jit_the_files_are_read_when_the_program_runs(self):
        total = jax.jit(
            lambda: nnx.models.from_pretrained(golden_directory("llama"), scan_layers=True).head.kernel.sum()
        )
        np.testing.assert_allclose(total(), golden_model("llama").head.kernel.sum(), rtol=1e-5)


class TestAdaptations:
    def test_lora_trains_a_loaded_model_and_is_saved_after_merging(self, tmp_path):
        model = nnx.models.from_pretrained(golden_directory("llama"))
        before = model(jnp.array([[1, 2, 3]]))
        paths = nnx.add_lora(model, 2, where="**/attention/*", ctx=nnx.context(0))
        assert len(paths) == 8
        for path in paths:
            lora = model.get_path(path).lora
            lora.lora_b = jnp.full_like(lora.lora_b, 0.1)
        adapted = model(jnp.array([[1, 2, 3]]))
        assert np.abs(adapted - before).max() > 1e-2
        with pytest.raises(ValueError, match="(?s)no place for 'layers/0/attention/key/lora/lora_a'.*nnx.merge_lora"):
            nnx.models.save_pretrained(model, tmp_path)
        assert not list(tmp_path.iterdir())
        nnx.merge_lora(model)
        nnx.models.save_pretrained(model, tmp_path)
        np.testing.assert_allclose(nnx.models.from_pretrained(tmp_path)(jnp.array([[1, 2, 3]])), adapted, atol=1e-4)

    def test_a_scanned_model_is_adapted_layer_by_layer(self):
        model = nnx.models.from_pretrained(golden_directory("llama"), scan_layers=True)
        nnx.add_lora(model, 2, where="**/attention/query", ctx=nnx.context(0))
        expected = golden_model("llama")(jnp.array([[1, 2, 3]]))
        np.testing.assert_allclose(model(jnp.array([[1, 2, 3]])), expected, atol=1e-4)

    def test_a_layer_can_be_replaced_by_an_equal_one(self):
        model = nnx.models.from_pretrained(golden_directory("llama"))
        model.layers[0].mlp = nnx.GatedMLP(32, 48, ctx=nnx.context(3))
        assert model(tokens_for(model.config, 1, 3)).shape == (1, 3, 96)


class TestSavingRefuses:
    def test_quantized_models(self, tmp_path):
        model = nnx.models.from_pretrained(golden_directory("llama"))
        nnx.quantize(model, 8, where="**/mlp/up")
        with pytest.raises(ValueError, match=r"quantized model.*'layers/0/mlp/up'.*nnx.dequantize\(model\)"):
            nnx.models.save_pretrained(model, tmp_path)
        assert not list(tmp_path.iterdir())
        nnx.dequantize(model)
        nnx.models.save_pretrained(model, tmp_path)
        assert nnx.models.from_pretrained(tmp_path).get_state() == model.get_state()

    def test_other_modules(self, tmp_path):
        with pytest.raises(TypeError, match="takes a model of nnx.models .Decoder.*, got Linear"):
            nnx.models.save_pretrained(nnx.Linear(2, 3, ctx=nnx.context(0)), tmp_path)

    def test_models_without_values(self, tmp_path):
        model = nnx.models.from_pretrained(golden_directory("llama"), abstract=True)
        with pytest.raises(ValueError, match="without values: 'embed/embedding' is ShapeDtypeStruct"):
            nnx.models.save_pretrained(model, tmp_path)

    def test_models_that_lost_a_parameter(self, tmp_path):
        model = tiny_model(use_qkv_bias=True, use_out_bias=True)
        model.layers[1].attention.query.bias = None
        with pytest.raises(ValueError, match="(?s)not the one .*layers/1/attention/query/bias is missing"):
            nnx.models.save_pretrained(model, tmp_path)
        assert not list(tmp_path.iterdir())

    def test_models_that_their_config_does_not_describe(self, tmp_path):
        model = tiny_model()
        model.layers[0].mlp = nnx.GatedMLP(16, 20, activation=nnx.gelu, ctx=nnx.context(0))
        model.layers[1].attention.rotary.base = 5.0
        model.layers[1].attention.sliding_window = 4
        with pytest.raises(ValueError) as error:
            nnx.models.save_pretrained(model, tmp_path)
        for line in (
            "layers/0/mlp/down/kernel is [20, 16], the config means [24, 16]",
            "layers/0/mlp: activation is ",
            "layers/1/attention: sliding_window is 4, the config means None",
            "layers/1/attention/rotary: base is 5.0, the config means 10000.0",
        ):
            assert line in str(error.value)
        assert not list(tmp_path.iterdir())


class TestBadDirectories:
    def test_a_name_is_not_downloaded(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no directory .*some-model.*never downloads"):
            nnx.models.from_pretrained(tmp_path / "some-model")

    def test_a_directory_without_a_config(self, directory):
        (directory / "config.json").unlink()
        with pytest.raises(FileNotFoundError, match="contains no config.json"):
            nnx.models.from_pretrained(directory)

    @pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000])
    def test_a_config_that_is_not_json(self, directory, text):
        (directory / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match="config.json cannot be read as JSON"):
            nnx.models.from_pretrained(directory)

    def test_an_unknown_model_type_lists_the_known_ones(self, directory):
        edited(directory, model_type="mamba")
        with pytest.raises(ValueError, match="(?s)config.json: the model_type 'mamba' .* gpt2, .*llama, .*phi3"):
            nnx.models.from_pretrained(directory)

    def test_a_directory_without_weights(self, llama):
        (llama / "model.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match="contains no safetensors file.$"):
            nnx.models.from_pretrained(llama)

    @pytest.mark.parametrize("problem", ["none", "no config", "broken config", "unknown model", "unknown quantization"])
    def test_pickles_are_refused_by_name_before_anything_else_fails(self, llama, problem):
        (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
        if problem == "no config":
            (llama / "config.json").unlink()
        elif problem == "broken config":
            (llama / "config.json").write_text("{")
        elif problem != "none":
            edited(llama, model_type="mamba", quantization_config={"quant_method": "gguf"})
        with pytest.raises(FileNotFoundError, match=r"weights as pickles \(pytorch_model.bin\).*safetensors.torch"):
            nnx.models.from_pretrained(llama)

    def test_a_missing_shard(self, directory):
        min(directory.glob("model-*.safetensors")).unlink()
        with pytest.raises(nnx.CheckpointError, match="model-00001-of-.*which is missing"):
            nnx.models.from_pretrained(directory)

    def test_a_truncated_shard(self, directory):
        shard = max(directory.glob("model-*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-10])
        with pytest.raises(nnx.CheckpointError, match=shard.name):
            nnx.models.from_pretrained(directory)

    def test_a_shard_with_a_flipped_bit(self, directory):
        shard = max(directory.glob("model-*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        with pytest.raises(nnx.CheckpointError, match="is damaged: the bytes of .* do not match their checksum"):
            nnx.models.from_pretrained(directory)


COUNTED = ("num_hidden_layers", "n_layer", "num_local_experts", "num_experts", "num_labels", "head_dim")


def numbers_in(fields: dict, path: tuple = ()):
    """The paths of all integers in a config, also in lists and objects."""
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        if isinstance(value, (dict, list)):
            yield from numbers_in(value, (*path, key))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield (*path, key)


@pytest.mark.parametrize("name", [*DIFFERENT, "bert_classifier", "clip", "resnet_classifier", "t5", "vit", "whisper"])
def test_a_config_with_a_huge_number_is_refused_or_loads_in_no_time(name, tmp_path):
    directory = shutil.copytree(golden_directory(name), tmp_path / name)
    fields = json.loads((directory / "config.json").read_text())
    added = {"num_labels": 2} if name in ("bert_classifier", "vit") else {}
    for path in numbers_in({**fields, **added}):
        changed_fields = json.loads(json.dumps({**fields, **added}))
        inner = changed_fields
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = 10**9
        changed_fields.pop("id2label" if path == ("num_labels",) else "", None)
        (directory / "config.json").write_text(json.dumps(changed_fields))
        begin = time.process_time()
        try:
            nnx.models.from_pretrained(directory, abstract=True)
        except ValueError as error:  # also a CheckpointError
            if path[-1] in COUNTED:
                assert f"{path[-1]}=1000000000 cannot be, because the files next to it have" in str(error)
        else:
            assert path[-1] not in COUNTED
        assert time.process_time() - begin < 5, path


def test_layers_and_experts_are_counted_together(tmp_path):
    directory = shutil.copytree(golden_directory("mixtral"), tmp_path / "mixtral")
    changed(directory, lambda arrays: arrays.update({f"x{i}": np.zeros(0) for i in range(1000)}, y=np.zeros(10**6)))
    edited(directory, num_hidden_layers=1000, num_local_experts=10**6)
    with pytest.raises(ValueError, match="num_local_experts=1000000 cannot be, .* 1048 tensors, whose longest axis is"):
        nnx.models.from_pretrained(directory)


class TestTensorsThatDoNotFit:
    def test_one_error_lists_everything(self, llama):
        def damage(arrays):
            del arrays["model.layers.1.mlp.up_proj.weight"]
            arrays["model.layers.0.self_attn.k_proj.weight"] = np.ones((12, 32), np.float32)
            arrays["model.layers.7.extra.weight"] = np.ones(3, np.float32)

        changed(llama, damage)
        with pytest.raises(nnx.CheckpointError) as error:
            nnx.models.from_pretrained(llama)
        lines = str(error.value).splitlines()[1:]
        assert sorted(line.strip() for line in lines) == [
            "missing: model.layers.1.mlp.up_proj.weight [48, 32], for layers/1/mlp/up/kernel",
            "unexpected: model.layers.7.extra.weight",
            "wrong shape: model.layers.0.self_attn.k_proj.weight is [12, 32], expected [16, 32] for "
            "layers/0/attention/key/kernel",
        ]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_hidden_layers": 3}, r"missing: model.layers.2.self_attn.q_proj.weight \[32, 32\]"),
            ({"num_hidden_layers": 1}, "unexpected: model.layers.1.self_attn.q_proj.weight"),
            ({"vocab_size": 97}, r"embed_tokens.weight is \[96, 32\], expected \[97, 32\]"),
            ({"attention_bias": True}, "missing: model.layers.0.self_attn.o_proj.bias"),
            ({"num_key_value_heads": 4}, "k_proj.weight is .16, 32., expected .32, 32."),
            (
                {"model_type": "phi3"},
                "missing: model.layers.0.self_attn.qkv_proj.weight .64, 32., for layers/0/attention/",
            ),
        ],
    )
    def test_a_config_that_disagrees_with_the_tensors(self, llama, changes, message):
        edited(llama, **changes)
        with pytest.raises(nnx.CheckpointError, match=f"(?s)do not fit its config.json.*{message}"):
            nnx.models.from_pretrained(llama)

    def test_a_long_list_is_cut(self, llama):
        edited(llama, num_hidden_layers=9)
        with pytest.raises(nnx.CheckpointError, match="… and 33 more$"):
            nnx.models.from_pretrained(llama)


def test_saving_a_loaded_model_copies_the_tokenizer_of_its_directory(tmp_path):
    source = tmp_path / "source"
    config = nnx.models.DecoderConfig(
        model_type="llama", vocab_size=8, features=8, hidden_features=8, num_layers=1, num_heads=1, max_length=8
    )
    model = nnx.models.Decoder(config, ctx=nnx.context(0))
    nnx.models.save_pretrained(model, source)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "notes.md"):
        (source / name).write_text(name)
    copied = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    loaded = nnx.models.from_pretrained(source)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tokenizer.json").write_text("mine")
    nnx.models.save_pretrained(loaded, tmp_path / "kept")
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == copied
    assert (tmp_path / "kept" / "tokenizer.json").read_text() == "mine"
    nnx.models.save_pretrained(loaded.clone(), tmp_path / "clone")  # nobody knows where it came from
    assert not (tmp_path / "clone" / "tokenizer.json").exists()
    nnx.models.save_pretrained(model, tmp_path / "named", files_from=source)
    assert sorted(file.name for file in (tmp_path / "named").iterdir()) == copied
