"""The decoder: lists and stacks of layers agree, decoding equals the full pass, and wrong tokens are noticed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from nnx.models.layer_spec import Stack
from tests.models.published import DIFFERENT, golden_model, tiny_config, tiny_model, tokens_for

WINDOWS = {"layer_types": ("sliding", "sliding", "full") * 2 + ("sliding",), "num_layers": 7, "sliding_window": 3}


def agree(out, expected) -> None:
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-4)


class TestScannedLayers:
    @pytest.mark.parametrize("changes", [{}, WINDOWS], ids=["equal layers", "alternating windows"])
    def test_a_scanned_model_equals_its_list_of_layers(self, changes):
        scanned = tiny_model(scan_layers=True, **changes)
        tokens = tokens_for(scanned.config, 2, 6)
        listed = scanned.unscanned()
        assert len(listed.layers) == scanned.config.num_layers
        agree(scanned(tokens), listed(tokens))

    def test_stacks_hold_whole_periods_of_the_windows_and_the_rest_is_a_list(self):
        model = tiny_model(scan_layers=True, **WINDOWS)
        stack = model.layers.scan_module
        assert model.config.period == 3
        assert len(stack.layers) == 3 and stack.layers[0].attention.query.kernel.shape == (2, 16, 4, 4)
        assert [block.attention.sliding_window for block in stack.layers] == [3, 3, None]
        assert [block.attention.sliding_window for block in model.tail] == [3]

    @pytest.mark.parametrize(
        ("types", "period"),
        [("ff", 1), ("sf" * 3, 2), ("sfs", 2), ("ssf", 3), ("sssssf" * 4 + "ss", 6), ("ffs", 3)],
    )
    def test_the_period_is_the_shortest_pattern_that_repeats(self, types, period):
        kinds = tuple({"f": "full", "s": "sliding"}[letter] for letter in types)
        config = tiny_config(num_layers=len(kinds), layer_types=kinds, sliding_window=2)
        assert config.period == period

    def test_layers_that_differ_at_the_start_come_before_the_stack(self):
        experts = {"num_experts": 4, "num_selected": 2, "dense_layers": (0,), "dense_features": 20}
        scanned = tiny_model(scan_layers=True, num_layers=6, unrotated_layers=(2, 4), **experts)
        assert scanned.config.stack == Stack(lead=1, period=2, count=2)
        assert [len(scanned.lead), len(scanned.layers.scan_module.layers), len(scanned.tail)] == [1, 2, 1]
        assert scanned.lead[0].mlp.up.kernel.shape == (16, 20)
        listed, tokens = scanned.unscanned(), tokens_for(scanned.config, 2, 6)
        assert [block.attention.rotary is None for block in listed.layers] == [False, False, True, False, True, False]
        agree(scanned(tokens), listed(tokens))
        out, _ = scanned.decode(tokens, scanned.init_cache(2, 6))
        agree(out, listed(tokens))

    @pytest.mark.parametrize("name", ["dense_layers", "unrotated_layers"])
    @pytest.mark.parametrize("listed", [(2,), (-1,), (1, 0), (0, 0)])
    def test_numbers_of_layers_that_are_not_there_are_refused(self, name, listed):
        with pytest.raises(ValueError, match=f"{name} to list numbers of the 2 layers, in order, got"):
            tiny_config(num_experts=2, num_selected=1, **{name: listed})

    def test_a_pattern_that_never_repeats_stays_a_list(self):
        model = nnx.models.Decoder(
            tiny_config(num_layers=3, layer_types=("full", "full", "sliding"), sliding_window=2),
            scan_layers=True,
            ctx=nnx.context(0),
        )
        assert isinstance(model.layers, nnx.Sequence) and model.unscanned() is model

    def test_unscanned_parameters_have_the_names_of_a_list(self):
        listed = tiny_model()
        unscanned = tiny_model(scan_layers=True).unscanned()
        named = nnx.name_axes(listed.clone())
        for path, variable in nnx.name_axes(unscanned).get_state().items():
            assert variable.sharding == named.get_state()[path].sharding, path

    def test_the_stacked_axis_is_named(self):
        model = nnx.name_axes(tiny_model(scan_layers=True))
        kernel = model.layers.scan_module.layers[0].mlp.up.variable("kernel")
        assert kernel.sharding == ("layers", "embed", "mlp")
        assert model.embed.variable("embedding").sharding == ("vocab", "embed")
        assert model.head.variable("kernel").sharding == ("embed", "vocab")

    def test_a_scanned_model_decodes(self):
        model = tiny_model(scan_layers=True, **WINDOWS)
        tokens = tokens_for(model.config, 2, 6)
        cache = model.init_cache(2, 8)
        assert len(cache.layers) == 7
        first, cache = nnx.jit(lambda model, *args: model.decode(*args))(model, tokens[:, :4], cache)
        second, cache = model.decode(tokens[:, 4:], cache)
        agree(np.concatenate([first, second], axis=1), model(tokens))

    def test_unscanning_an_abstract_model_needs_no_values(self):
        model = nnx.eval_shape(lambda: tiny_model(scan_layers=True))
        assert model.unscanned().layers[1].mlp.up.kernel.shape == (16, 24)


@pytest.mark.parametrize("scan_layers", [False, True], ids=["list", "scanned"])
def test_recomputing_layers_changes_no_gradient(scan_layers):
    model = tiny_model(scan_layers=scan_layers)
    tokens = tokens_for(model.config, 2, 5)

    def loss(model):
        return (model(tokens) ** 2).mean()

    def program(model):
        return str(jax.make_jaxpr(lambda state: loss(model.get_module_def().merge(state)))(model.get_state()))

    gradient = nnx.jit(nnx.grad(loss))
    plain = gradient(model)
    assert "policy=" not in program(model)
    model.remat = jax.checkpoint_policies.dots_saveable
    assert "policy=" in program(model) and "policy=None" not in program(model)
    jax.tree.map(agree, gradient(model), plain)


def test_a_block_can_still_be_asked_for_by_whether_it_has_a_window():
    config = tiny_config(**WINDOWS)
    for sliding, window in ((True, 3), (False, None)):
        with pytest.warns(DeprecationWarning, match=r"config.layers\[i\]"):
            block = nnx.models.DecoderBlock(config, sliding, ctx=nnx.context(0))
        assert block.attention.sliding_window == window


class TestFeatures:
    @pytest.mark.parametrize(
        "changes", [{}, {"tie_embeddings": True, "logits_soft_cap": 2.0}], ids=["own head", "tied"]
    )
    def test_blockwise_loss_equals_the_loss_of_the_logits(self, changes):
        model = tiny_model(**changes)
        tokens = tokens_for(model.config, 2, 6)

        def plain(model):
            return nnx.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

        def blockwise(model):
            features, cap = model.features(tokens[:, :-1]), model.config.logits_soft_cap
            return nnx.linear_cross_entropy(features, model.head_kernel, tokens[:, 1:], soft_cap=cap, block_size=3)

        (loss, gradient), (expected, others) = (nnx.jit(nnx.value_and_grad(f))(model) for f in (blockwise, plain))
        agree(loss, expected)
        jax.tree.map(agree, gradient, others)

    @pytest.mark.parametrize("tied", [False, True])
    def test_head_kernel_of_a_quantized_model_is_its_weight(self, tied):
        model = tiny_model(tie_embeddings=tied)
        nnx.quantize(model, where="embed" if tied else "head")
        features = model.features(tokens_for(model.config, 1, 4))
        agree(features @ model.head_kernel, model.logits(features))

    def test_an_adapted_head_is_not_one_matrix(self):
        model = tiny_model()
        nnx.add_lora(model, 2, where="head", ctx=nnx.context(0))
        with pytest.raises(ValueError, match="is a LoRALinear, which is more than one matrix.*model.logits"):
            _ = model.head_kernel


class TestDecoding:
    @pytest.mark.parametrize("name", DIFFERENT)
    def test_ragged_rows_in_chunks_equal_each_row_alone(self, name):
        model = golden_model(name)
        texts = tokens_for(model.config, 2, 12)
        alone = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, texts))
        decode = nnx.jit(lambda model, *args: model.decode(*args))
        held, cache = np.array([0, 0]), model.init_cache(2, 14)
        for lengths in ([4, 2], [3, 4], [1, 4], [4, 0]):
            chunk = np.zeros((2, 4), np.int32)
            for row, n in enumerate(lengths):
                chunk[row, :n] = texts[row, held[row] : held[row] + n]
            logits, cache = decode(model, chunk, cache, jnp.array(lengths))
            for row, n in enumerate(lengths):
                agree(logits[row, :n], alone[row, held[row] : held[row] + n])
            held += lengths
        assert cache.lengths.tolist() == [12, 10]

    def test_the_cache_has_the_dtype_of_the_computation_unless_told(self):
        model = nnx.models.Decoder(tiny_config(), param_dtype=jnp.bfloat16, ctx=nnx.context(0))
        assert model.init_cache(1, 4).layers[0].key.dtype == jnp.bfloat16
        assert model.init_cache(1, 4, jnp.float32).layers[0].key.dtype == jnp.float32
        logits, cache = model.decode(jnp.array([[1, 2]]), model.init_cache(1, 4))
        assert logits.dtype == cache.layers[1].value.dtype == jnp.bfloat16

    def test_a_row_that_overflows_is_an_error_or_nan(self):
        model = tiny_model()
        tokens = tokens_for(model.config, 2, 3)
        cache = nnx.DecoderCache(model.init_cache(2, 4).layers, jnp.array([2, 1]))
        with pytest.raises(ValueError, match="row 0 holds 2 tokens and would come to 5"):
            model.decode(tokens, cache)
        logits, after = nnx.jit(lambda model, *args: model.decode(*args))(model, tokens, cache)
        assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
        with pytest.raises(ValueError, match="DecoderCache is full"):
            after.check()

    def test_a_cache_of_another_model_or_batch_is_refused(self):
        model, other = tiny_model(), tiny_model(num_layers=3)
        with pytest.raises(ValueError, match="cache with 2 layers .* got one with 3"):
            model.decode(jnp.array([[1]]), other.init_cache(1, 4))
        with pytest.raises(ValueError, match="cache with 1 rows, .* got 2"):
            model.decode(jnp.array([[1]]), model.init_cache(2, 4))


class TestTokens:
    @pytest.mark.parametrize("bad", [-1, 32, 999])
    def test_tokens_outside_the_vocabulary_are_an_error_or_nan(self, bad):
        model = tiny_model()
        tokens = jnp.array([[1, 2, 3], [4, bad, 5]])
        with pytest.raises(ValueError, match=rf"within 0..31 \(vocab_size=32\), got {bad} at index \(1, 1\)"):
            model(tokens)
        with pytest.raises(ValueError, match="within 0..31"):
            model.decode(tokens, model.init_cache(2, 4))
        logits = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
        assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()

    def test_wrong_shapes_and_dtypes_are_errors(self):
        model = tiny_model()
        with pytest.raises(ValueError, match=r"shape \[batch, length\], got an array of shape \(3,\)"):
            model(jnp.array([1, 2, 3]))
        with pytest.raises(ValueError, match="expected integer tokens, got dtype float32"):
            model(jnp.ones((1, 3)))

    def test_learned_positions_end_with_the_context(self):
        model = tiny_model(rotary=None, max_length=4, model_type="gpt2")
        model(tokens_for(model.config, 1, 4))
        with pytest.raises(ValueError, match="max_length=4 tokens, and the text has 5"):
            model(tokens_for(model.config, 1, 5))


def test_packed_documents_equal_single_ones():
    model = tiny_model()
    first, second = tokens_for(model.config, 1, 3), tokens_for(model.config, 1, 4, seed=1)
    packed = jnp.concatenate([first, second], axis=1)
    mask = nnx.make_segment_mask(jnp.array([[1] * 3 + [2] * 4]))
    out = model(packed, positions=jnp.array([[0, 1, 2, 0, 1, 2, 3]]), mask=mask)
    agree(out[:, :3], model(first))
    agree(out[:, 3:], model(second))


def test_a_model_can_be_trained():
    model = tiny_model(scan_layers=True)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2))
    tokens = tokens_for(model.config, 2, 8)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = jax.nn.log_softmax(model(tokens[:, :-1]))
            return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


def test_adaptations_of_scanned_layers_are_trained_and_nothing_else_is():
    windows = ("sliding", "full", "sliding", "full", "sliding")  # a period of two layers, twice, and a tail
    model = tiny_model(scan_layers=True, num_layers=5, layer_types=windows, sliding_window=3)
    nnx.add_lora(model, 2, where="**/attention/*", ctx=nnx.context(1))
    assert model.layers.scan_module.layers[0].attention.out.lora.lora_a.shape == (2, 16, 2)
    before = model.filter(nnx.Param)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    tokens = tokens_for(model.config, 4, 7)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            log_probs = jax.nn.log_softmax(model(tokens[:, :-1]))
            return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1))

        value, grads = nnx.value_and_grad(loss, wrt=nnx.LoRAParam)(model)
        optimizer.update(grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1
    assert model.filter(nnx.Param) == before
    logits = model(tokens)
    nnx.merge_lora(model)
    agree(model(tokens), logits)


def test_two_models_built_alike_have_equal_definitions():
    first, second = (nnx.models.Decoder(tiny_config(), ctx=nnx.context(seed)) for seed in (0, 1))
    assert first.get_module_def() == second.get_module_def()


def test_unknown_activations_list_the_known_ones():
    with pytest.raises(ValueError, match="(?s)'snake' is not among the known ones: silu, .*gelu_new"):
        nnx.models.Decoder(tiny_config(activation="snake"), ctx=nnx.context(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers to be a positive integer, got 0"),
        ({"num_heads": True}, "num_heads to be a positive integer, got True"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"layer_types": ("full",)}, "for each of the 2 layers"),
        ({"use_head_bias": True, "tie_embeddings": True}, "an output layer of its own"),
        ({"layer_types": ("full", "round")}, "'full', 'sliding', 'section' or 'linear'"),
        ({"layer_types": ("full", "sliding")}, "need a sliding_window >= 1, got None"),
        ({"norm": "batch"}, "'rms' or 'layer', got 'batch'"),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


class TestFrequenciesThatDependOnTheLength:
    LONG = nnx.LongRoPEScaling((1.0, 1.5), (3.0, 9.0), original_max_length=6, factor=4.0)
    DYNAMIC = nnx.DynamicNTKScaling(3.0, original_max_length=6)

    @pytest.mark.parametrize("scaling", [LONG, DYNAMIC], ids=["long", "dynamic"])
    def test_a_cache_uses_those_of_the_longest_text_it_can_hold(self, scaling):
        model = tiny_model(rotary=nnx.models.RotaryConfig(scaling=scaling))
        tokens = tokens_for(model.config, 2, 9)
        for length in (6, 9):
            text = tokens[:, :length]
            first, cache = model.decode(text[:, :4], model.init_cache(2, length))
            rest, _ = model.decode(text[:, 4:], cache)
            np.testing.assert_allclose(jnp.concatenate([first, rest], 1), model(text), rtol=1e-4, atol=1e-4)
        assert abs(model(tokens)[:, :6] - model(tokens[:, :6])).max() > 0.01

    @pytest.mark.parametrize("new", [3, 4])
    def test_generation_makes_no_longer_cache_than_the_text_needs(self, new):
        # Four tokens and three new ones, of which the last is not read, are 6; one more is a long text throughout.
        model = tiny_model(rotary=nnx.models.RotaryConfig(scaling=self.LONG))
        tokens = tokens_for(model.config, 2, 4)
        written = nnx.generate(model, tokens, max_new_tokens=new, temperature=0)
        text = jnp.concatenate([tokens, written[:, :-1]], 1)
        np.testing.assert_array_equal(jnp.argmax(model(text)[:, 3:], -1), written)
