"""The arguments of `nnx.generate`: checked, converted to numpy and padded on the host.

Values are checked where they are known. Inside a transform, prompts and lengths may be tracers: then only their shapes
are checked, and they are padded by JAX.
"""

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.context import Context
from nnx.core.trace import is_tracer
from nnx.generation.programs import Prompt
from nnx.generation.sampling import Sampling

CANNOT_GENERATE = (
    "nnx.generate: expected a Module with the methods `init_cache(batch, length, dtype=None)` and `decode(tokens, "
    "cache, lengths=None)`, got {got}. The guide has an example of both (docs/guide/generation.md, Your own model). "
    "For a short text, a model without a cache can read all of it again for each token: "
    "`ids = jnp.concatenate([ids, model(ids)[:, -1:].argmax(-1)], axis=1)`."
)
WRONG_PROMPTS = (
    "nnx.generate: expected prompts of shape [batch, length] with whole numbers, got {got}. Pad rows of different "
    "lengths on the right, and pass their real lengths as `lengths`; write `np.array([prompt])` for a single one."
)
TEXT_PROMPTS = (
    "nnx.generate: prompts are token ids, not text; got {got}. Encode the text with the tokenizer of the model first: "
    "`prompts = np.array([nnx.models.Tokenizer.from_pretrained(directory).encode(text)])`."
)
EMPTY_PROMPT = (
    "nnx.generate: a prompt needs at least one token, since that is what the first new token follows; got {got}. Begin "
    "an empty text with the model's begin-of-text token."
)
WRONG_LENGTHS = "nnx.generate: expected lengths of shape ({batch},), one per prompt, from 1 to {width}, got {got}."
NOT_TOKENS = "nnx.generate: expected {name} of tokens, numbers from 0 to 2**31 - 1, got {got}."
WRONG_PREFIX = "nnx.generate: expected a prefix of shape [length] with at least one token, got {got}."
WRONG_NUMBER = "nnx.generate: expected {name} to be {expected}, got {got!r}."
WRONG_STOP_TOKENS = "nnx.generate: expected stop_tokens to be a sequence of whole numbers, got {got!r}."
NO_CONTEXT = (
    "nnx.generate: drawing tokens needs random numbers, and no Context was given. Pass ctx=nnx.context(sample=0), or "
    "temperature=0 to take the most likely token each time."
)
TOO_LONG = (
    "nnx.generate: {name} holds texts of at most max_length={limit} tokens, and this call needs {needed}: {prompt} of "
    "the prompt and {new} new ones, of which the last need not be held. Shorten the prompt or lower max_new_tokens."
)
STREAM_IN_TRANSFORM = (
    "nnx.generate: `stream` is called while tokens are written, which is not possible inside a transform such as jit. "
    "Call nnx.generate outside (it compiles what it runs), or leave `stream` out."
)


def check_model(model: Any) -> None:
    """Raises `TypeError` unless the model has the methods that generation uses."""
    for method in ("init_cache", "decode", "partition"):
        if not callable(getattr(model, method, None)):
            raise TypeError(CANNOT_GENERATE.format(got=f"{type(model).__name__} without `{method}`"))


def as_prompt(prompts: Any, lengths: Any) -> tuple[Prompt, int]:
    """Returns the prompts with their lengths, and the number of tokens of the longest."""
    tokens = _whole_numbers(prompts)
    if tokens is None or tokens.ndim != 2:
        message = TEXT_PROMPTS if _is_text(prompts) else WRONG_PROMPTS
        raise ValueError(message.format(got=_describe(prompts)))
    batch, width = tokens.shape
    if batch == 0 or width == 0:
        raise ValueError(EMPTY_PROMPT.format(got=f"prompts of shape {tokens.shape}"))
    if lengths is None:
        lengths = np.full(batch, width, np.int32)
    else:
        given, lengths = lengths, _whole_numbers(lengths)
        if lengths is None or lengths.shape != (batch,):
            raise ValueError(WRONG_LENGTHS.format(batch=batch, width=width, got=_describe(given)))
    if is_tracer(tokens) or is_tracer(lengths):
        # Their values cannot be checked here. Clipped, a wrong length is at least one that the row can have.
        return Prompt(jnp.asarray(tokens, jnp.int32), jnp.clip(jnp.asarray(lengths, jnp.int32), 1, width)), width
    if (lengths == 0).any():
        raise ValueError(EMPTY_PROMPT.format(got=f"lengths={lengths.tolist()}"))
    if lengths.min() < 1 or lengths.max() > width:
        raise ValueError(WRONG_LENGTHS.format(batch=batch, width=width, got=lengths.tolist()))
    tokens = np.where(np.arange(width) < lengths[:, None], tokens, 0)
    _check_tokens("prompts", tokens)
    return Prompt(tokens.astype(np.int32), lengths.astype(np.int32)), int(lengths.max())


def as_prefix(prefix: Any) -> tuple[Prompt, int]:
    """Returns the prefix as a batch of one text, and its number of tokens."""
    tokens = _whole_numbers(prefix)
    if tokens is None or tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(WRONG_PREFIX.format(got=_describe(prefix)))
    if not is_tracer(tokens):
        _check_tokens("a prefix", tokens)
    return Prompt(tokens[None].astype(np.int32), np.full(1, tokens.size, np.int32)), tokens.size


def padded(prompt: Prompt, width: int) -> Prompt:
    """Returns the prompt with its rows padded, or cut if only padding is lost, to `width` tokens."""
    tokens = prompt.tokens[:, :width]
    pad = jnp.pad if is_tracer(tokens) else np.pad
    return Prompt(pad(tokens, ((0, 0), (0, width - tokens.shape[1]))), prompt.lengths)


def as_count(name: str, value: Any) -> int:
    """Returns a positive whole number."""
    number = as_int(name, value, "a positive int")
    if number < 1:
        raise ValueError(WRONG_NUMBER.format(name=name, expected="a positive int", got=value))
    return number


def as_int(name: str, value: Any, expected: str = "an int") -> int:
    """Returns a whole number, which may be given as an array without axes."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(WRONG_NUMBER.format(name=name, expected=expected, got=value)) from None


def as_sampling(
    temperature: Any, top_k: Any, top_p: Any, min_p: Any, repetition_penalty: Any, ctx: Context | None
) -> Sampling:
    """Returns the values of the sampling rules as arrays; greedy decoding keeps none of the thresholds."""
    if temperature is None:
        raise ValueError(WRONG_NUMBER.format(name="temperature", expected="at least 0", got=None))
    temperature = _number("temperature", temperature, lambda t: 0 <= t < float("inf"), "finite and at least 0")
    if top_k is not None and not is_tracer(top_k):
        top_k = np.int32(min(as_count("top_k", top_k), np.iinfo(np.int32).max))
    top_p = _number("top_p", top_p, lambda p: 0 < p <= 1, "above 0 and at most 1")
    min_p = _number("min_p", min_p, lambda p: 0 <= p <= 1, "from 0 to 1")
    penalty = _number("repetition_penalty", repetition_penalty, lambda r: 0 < r < float("inf"), "finite and above 0")
    if not is_tracer(temperature) and temperature == 0:
        return Sampling(repetition_penalty=penalty)  # the most likely token passes every threshold
    if ctx is None:
        raise ValueError(NO_CONTEXT)
    return Sampling(temperature, top_k, top_p, min_p, penalty)


def as_stop_tokens(stop_tokens: Any) -> Any:
    """Returns the tokens that end a row as an array, or None if there are none.

    The array has at least four entries, and twice as many where needed, so that one stop token or three use the same
    compiled function. The rest is -1, which is not a token.
    """
    if isinstance(stop_tokens, (int, np.integer)) and not isinstance(stop_tokens, bool):
        stop_tokens = (stop_tokens,)
    if not isinstance(stop_tokens, (Iterable, np.ndarray, jax.Array)) or isinstance(stop_tokens, (str, bytes)):
        raise ValueError(WRONG_STOP_TOKENS.format(got=stop_tokens))
    tokens = np.asarray(sorted(stop_tokens) if isinstance(stop_tokens, (set, frozenset)) else list(stop_tokens))
    if tokens.size == 0:
        return None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or tokens.min() < 0:
        raise ValueError(WRONG_STOP_TOKENS.format(got=stop_tokens))
    room = max(4, 1 << (tokens.size - 1).bit_length())
    return np.pad(tokens.astype(np.int32), (0, room - tokens.size), constant_values=-1)


def check_room(model: Any, prompt: int, new: int) -> int | None:
    """Returns the model's `max_length` if it has one, after checking that the text fits."""
    limit = getattr(model, "max_length", None)
    if not isinstance(limit, int):
        return None
    # The last new token is returned, but never decoded: it needs no slot and no position.
    if prompt + new - 1 > limit:
        name, needed = type(model).__name__, prompt + new - 1
        raise ValueError(TOO_LONG.format(name=name, limit=limit, needed=needed, prompt=prompt, new=new))
    return limit


def _number(name: str, value: Any, accepts: Any, expected: str) -> Any:
    if value is None or is_tracer(value):
        return value
    number = np.asarray(value)
    # NaN fails every comparison, so it is never accepted.
    if number.shape != () or number.dtype.kind not in "iuf" or not accepts(float(number)):
        raise ValueError(WRONG_NUMBER.format(name=name, expected=expected, got=value))
    return np.float32(number)


def _whole_numbers(values: Any) -> Any:
    """Returns values as a numpy array, or as they are if they are traced; None unless they are whole numbers."""
    if not is_tracer(values):
        try:
            values = np.asarray(values)
        except (ValueError, TypeError):  # rows of different lengths
            return None
    return values if jnp.issubdtype(values.dtype, jnp.integer) else None


def _is_text(prompts: Any) -> bool:
    try:
        return np.asarray(prompts).dtype.kind in "SU"
    except (ValueError, TypeError):  # rows of different lengths
        return False


def _check_tokens(name: str, tokens: np.ndarray) -> None:
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token <= np.iinfo(np.int32).max:
            raise ValueError(NOT_TOKENS.format(name=name, got=int(token)))


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}..."
