"""nnx.plot_attention: the weights of each head as a picture."""

import jax.numpy as jnp
import numpy as np
import pytest

import nnx


def test_the_weights_that_attention_sows_are_drawn_with_a_panel_per_head(tmp_path):
    attention = nnx.MultiHeadAttention(2, 8, ctx=nnx.context(0)).eval()
    attention(jnp.ones((2, 3, 8)), sow_weights=True)
    file = nnx.plot_attention(
        attention.pop_state(nnx.Intermediate), tmp_path / "heads.svg", tokens=["<s>", "a$b", "_c"], title="layer 0"
    )
    text = file.read_text()
    assert text.count('id="axes_') == 3  # two heads and the scale
    assert text.count("head ") >= 2 and "layer 0" in text


def test_many_tokens_get_every_nth_label_and_one_matrix_is_one_panel(tmp_path):
    weights = np.eye(100, dtype=np.float32)
    file = nnx.plot_attention(weights, tmp_path / "one.png", tokens=[str(i) for i in range(100)])
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (np.ones(3), {}, "takes attention weights of shape"),
        (np.ones((1, 2, 3, 3)), {"example": 1}, "no example 1 in a batch of 1"),
        (np.ones((3, 3)), {"tokens": ["a"]}, "1 tokens were given for 3"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, weights, options, message):
    with pytest.raises(ValueError, match=message):
        nnx.plot_attention(weights, tmp_path / "x.png", **options)
