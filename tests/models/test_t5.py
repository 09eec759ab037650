"""T5: buckets of distances, writing with a source through the cache, tied and untied output layers, and its errors."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models.golden_files import sums
from tests.models.published import edited, golden_arrays, golden_directory, golden_model, golden_text

WRITERS = ("t5", "t5_v1_1")
writers = pytest.mark.parametrize("name", WRITERS)


def conditioned(name):
    model, (inputs, _) = golden_model(name), golden_arrays(name)
    return model.conditioned(model.encode(inputs["tokens"], inputs["mask"]), inputs["mask"]), inputs


class TestPositions:
    def test_near_distances_have_a_bucket_each_and_far_ones_share_them(self):
        # The published settings; worked out by hand from 8 * log(distance / 16) / log(128 / 16) and so on.
        def buckets(number, farthest):
            layer = nnx.models.RelativePositionBias(number, farthest, 2, bidirectional=False, ctx=nnx.context(0))
            return layer.buckets(jnp.array([farthest]), jnp.arange(farthest + 1))[0, ::-1]

        assert buckets(32, 128)[:17].tolist() == list(range(17))
        assert buckets(32, 128)[jnp.array([20, 21, 32, 64, 127, 128])].tolist() == [17, 18, 21, 26, 31, 31]
        assert buckets(4, 5).tolist() == [0, 1, 2, 2, 3, 3]

    def test_keys_ahead_have_their_own_buckets_only_if_bidirectional(self):
        def buckets(bidirectional):
            layer = nnx.models.RelativePositionBias(8, 16, 2, bidirectional=bidirectional, ctx=nnx.context(0))
            return layer.buckets(jnp.array([2]), jnp.arange(5))[0].tolist()

        assert buckets(True) == [2, 1, 0, 5, 6]
        assert buckets(False) == [2, 1, 0, 0, 0]

    def test_bias_is_looked_up_by_bucket_and_head(self):
        layer = nnx.models.RelativePositionBias(8, 16, 3, bidirectional=True, ctx=nnx.context(0))
        positions = jnp.array([[0, 1], [5, 9]])
        bias = layer(positions, jnp.arange(4))
        assert bias.shape == (2, 3, 2, 4)
        buckets = layer.buckets(positions, jnp.arange(4))
        assert bias[1, 2, 0, 3] == layer.embedding[buckets[1, 0, 3], 2]

    @pytest.mark.parametrize(("buckets", "distance"), [(3, 128), (32, 16)])
    def test_settings_without_room_are_refused(self, buckets, distance):
        with pytest.raises(ValueError, match=f"num_buckets={buckets} and max_distance={distance}"):
            nnx.models.RelativePositionBias(buckets, distance, 2, bidirectional=True, ctx=nnx.context(0))


class TestWriting:
    @writers
    def test_greedy_text_is_that_of_transformers(self, name):
        model, _ = conditioned(name)
        expected = golden_text(name)
        start = jnp.zeros((2, 1), jnp.int32)
        out = nnx.generate(model, start, max_new_tokens=expected.shape[1], temperature=0)
        np.testing.assert_array_equal(out, expected)

    def test_several_samples_read_the_source_of_their_row(self):
        model, _ = conditioned("t5")
        start = jnp.zeros((2, 1), jnp.int32)
        out = nnx.generate(model, start, max_new_tokens=8, temperature=0, num_samples=3)
        for sample in range(3):
            np.testing.assert_array_equal(out[:, sample], golden_text("t5")[:, :8])

    def test_a_shared_prefix_is_an_error_or_nan_but_never_another_rows_source(self):
        model, _ = conditioned("t5")
        with pytest.raises(ValueError, match="expected a batch of 2, one row for each row of the source, got 1"):
            model.init_cache(1, 8)
        with pytest.warns(RuntimeWarning, match=r"row\(s\) 0, 1 were NaN"):
            nnx.generate(model, jnp.zeros((2, 1), jnp.int32), prefix=[0, 3], max_new_tokens=2, temperature=0)

    def test_decoding_in_parts_equals_the_call(self):
        model, inputs = conditioned("t5")
        expected = golden_arrays("t5")[1]["logits"]
        tokens, cache = inputs["decoder_tokens"], model.init_cache(2, 20)
        decode = nnx.jit(lambda model, tokens, cache, lengths: model.decode(tokens, cache, lengths))
        first, cache = decode(model, tokens[:, :7], cache, jnp.array([7, 5]))
        assert cache.lengths.tolist() == [7, 5] and cache.max_length == 20
        np.testing.assert_allclose(sums(first[0]), expected[0, :7], atol=1e-4)
        np.testing.assert_allclose(sums(first[1, :5]), expected[1, :5], atol=1e-4)
        rows = np.stack([tokens[0, 7:10], tokens[1, 5:8]])
        second, cache = decode(model, rows, cache, None)
        np.testing.assert_allclose(sums(second[0]), expected[0, 7:10], atol=1e-4)
        np.testing.assert_allclose(sums(second[1]), expected[1, 5:8], atol=1e-4)
        cache.check()


class TestFiles:
    def copied(self, tmp_path, name, changes, **tensors):
        shutil.copytree(golden_directory(name), tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        found = {key: np.array(array) for key, array in nnx.load_safetensors(file).items()} | tensors
        nnx.save_safetensors(file, nnx.State({key: array for key, array in found.items() if array is not None}))
        edited(tmp_path / name, **changes)
        return nnx.models.from_pretrained(tmp_path / name)

    def test_output_layer_in_the_files_is_used_despite_a_tied_config(self, tmp_path):
        # As newer versions of transformers save version 1.1.
        model = self.copied(tmp_path, "t5_v1_1", {"tie_word_embeddings": True, "scale_decoder_outputs": False})
        assert model.config == golden_model("t5_v1_1").config
        assert model.get_state() == golden_model("t5_v1_1").get_state()

    def test_copies_of_the_embedding_and_unused_tables_are_allowed(self, tmp_path):
        table = np.asarray(golden_model("t5").embed.embedding)
        unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        copies = {"encoder.embed_tokens.weight": table, "decoder.embed_tokens.weight": table, unused: table[:8, :4]}
        model = self.copied(tmp_path, "t5", {}, **copies, **{"shared.weight": None})
        assert model.get_state() == golden_model("t5").get_state()

    def test_absent_entries_mean_the_defaults_of_transformers(self, tmp_path):
        absent = {"num_decoder_layers": ..., "layer_norm_epsilon": ..., "feed_forward_proj": ..., "is_decoder": ...}
        config = self.copied(tmp_path, "t5", absent).config
        assert (config.num_decoder_layers, config.norm_epsilon, config.feed_forward) == (2, 1e-6, "relu")
        assert config.tie_embeddings and config.scale_logits

    def test_changed_positions_are_not_saved_as_if_they_were_the_configs(self, tmp_path):
        model = nnx.models.from_pretrained(golden_directory("t5"))
        model.encoder.positions.max_distance = 50
        with pytest.raises(ValueError, match="encoder/positions: max_distance is 50, the config means 128"):
            nnx.models.save_pretrained(model, tmp_path)


class TestErrors:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_decoder_layers": 0}, "T5Config: expected num_decoder_layers to be a positive integer, got 0"),
            ({"task": "generation"}, "task to be one of 'encoding' or None, got 'generation'"),
        ],
    )
    def test_configs_that_make_no_sense_are_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            nnx.models.T5Config(**changes)

    def test_the_class_has_to_fit_the_task(self):
        with pytest.raises(ValueError, match="use T5Encoder, or set task=None"):
            nnx.models.T5(nnx.models.T5Config(task="encoding"), ctx=nnx.context(0))
        with pytest.raises(ValueError, match="expected task='encoding' in the config, got None"):
            nnx.models.T5Encoder(nnx.models.T5Config(), ctx=nnx.context(0))

    def test_masks_and_caches_of_another_shape(self):
        model, inputs = conditioned("t5")
        with pytest.raises(ValueError, match=r"T5: expected a mask of shape .* = \(2, 12\) for the source"):
            model.model.encode(inputs["tokens"], inputs["mask"][:, :5])
        with pytest.raises(ValueError, match=r"T5: expected a mask .* got \(2, 5\)"):
            model.model.conditioned(model.encoded, inputs["mask"][:, :5])
        with pytest.raises(ValueError, match="T5.decode: expected a cache with 1 rows, one per row of tokens, got 2"):
            model.decode(jnp.zeros((1, 1), jnp.int32), model.init_cache(2, 8))

    def test_tokens_outside_the_vocabulary(self):
        with pytest.raises(ValueError, match=r"T5: expected tokens within 0\.\.59"):
            golden_model("t5").encode(jnp.array([[3, 60]]))


def test_shards_follow_the_rules():
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    rules = nnx.fsdp_tensor_parallel_rules()
    plan = nnx.models.from_pretrained(golden_directory("t5_v1_1"), mesh=mesh, rules=rules, abstract=True)
    assert plan.decoder.positions.embedding.sharding.spec == jax.P(None, "model")
    assert plan.decoder.layers[0].cross_attention.query.kernel.sharding.spec == jax.P("data", "model", None)
    assert plan.head.kernel.sharding.spec == jax.P("data", "model")


def test_training_reaches_every_parameter():
    model, (inputs, _) = nnx.models.from_pretrained(golden_directory("t5_v1_1")), golden_arrays("t5_v1_1")

    @nnx.jit
    def gradient(model, inputs):
        return nnx.grad(lambda model: jnp.square(model(**inputs)).mean())(model)

    for path, leaf in gradient(model, inputs).items():
        assert np.abs(leaf.value).max() > 0, path
