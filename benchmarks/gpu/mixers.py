"""Latent attention and gated delta networks: tokens written per second, and training next to attention.

    python -m benchmarks.gpu.mixers                 models of about a billion parameters, on a GPU
    python -m benchmarks.gpu.mixers --tiny          the default without a GPU: tiny models, to see that it runs
    python -m benchmarks.gpu.mixers --only train    one of latent, train, delta
    python -m benchmarks.gpu.mixers --out FOLDER    write a record of each part there (see benchmarks/record.py)

*Train* runs forward and backward of one layer, as wide as those of the models, for two lengths of text with equally
many tokens. The others let a decoder write 128 tokens after a prompt of as many, greedily, in bfloat16, next to
`transformers` with a model of the same sizes, if it is installed, which writes 32. Times include reading the prompt.
"""

# PyTorch and transformers are not among the project's dependencies.
# pyright: reportMissingImports=false

import argparse
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing has to be looked for on the network
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the rest of the memory is for PyTorch

import jax
import jax.numpy as jnp
import numpy as np

import nnx
from benchmarks import record

PARTS = ("latent", "train", "delta")
LATENT: dict[str, Any] = dict(query_rank=768, latent_rank=512, head_dim=128, rotary_dim=64, value_dim=128)
DELTA: dict[str, Any] = dict(delta_heads=32, delta_key_heads=16, delta_key_dim=128, delta_value_dim=128)


def latent_config(tiny: bool) -> nnx.models.DecoderConfig:
    """Returns a dense model with the layers of DeepSeek-V3."""
    sizes: dict[str, Any] = dict(features=64, hidden_features=96, num_layers=2, num_heads=4, vocab_size=256)
    if not tiny:
        sizes = dict(features=2048, hidden_features=8192, num_layers=16, num_heads=16, vocab_size=32000)
    ranks: dict[str, Any] = dict(query_rank=24, latent_rank=32, head_dim=16, rotary_dim=8, value_dim=16)
    rotary = nnx.models.RotaryConfig(interleaved=True)
    return nnx.models.DecoderConfig(
        model_type="llama", max_length=4096, rotary=rotary, **sizes, **(ranks if tiny else LATENT)
    )


def delta_config(tiny: bool) -> nnx.models.DecoderConfig:
    """Returns a dense model with the layers of Qwen3.5: three of four are gated delta networks."""
    sizes: dict[str, Any] = dict(
        features=64, hidden_features=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=256
    )
    delta: dict[str, Any] = dict(delta_heads=4, delta_key_heads=2, delta_key_dim=16, delta_value_dim=16)
    if not tiny:
        sizes = dict(features=2048, hidden_features=6144, num_layers=16, num_heads=8, num_kv_heads=2)
        sizes |= dict(head_dim=256, vocab_size=32000)
        delta = DELTA
    return nnx.models.DecoderConfig(
        model_type="llama",
        max_length=4096,
        layer_types=("linear", "linear", "linear", "full") * (sizes["num_layers"] // 4),
        rotary=nnx.models.RotaryConfig(fraction=0.25),
        normalize_qk=True,
        use_attention_gate=True,
        norm_offset=1.0,
        **sizes,
        **delta,
    )


def reference(kind: str, config: nnx.models.DecoderConfig) -> Any:
    """Returns a random model of `transformers` with the same sizes."""
    import torch
    import transformers

    sizes = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.features,
        intermediate_size=config.hidden_features,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_length,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    if kind == "latent":
        ranks = {"q_lora_rank": "query_rank", "kv_lora_rank": "latent_rank", "qk_nope_head_dim": "head_dim"}
        ranks |= {"qk_rope_head_dim": "rotary_dim", "v_head_dim": "value_dim"}
        sizes |= {name: getattr(config, field) for name, field in ranks.items()}
        sizes |= {"first_k_dense_replace": config.num_layers}
    else:
        heads = {"linear_num_value_heads": "delta_heads", "linear_num_key_heads": "delta_key_heads"}
        heads |= {"linear_key_head_dim": "delta_key_dim", "linear_value_head_dim": "delta_value_dim"}
        sizes |= {name: getattr(config, field) for name, field in heads.items()} | {"head_dim": config.head_dim}
    settings = transformers.AutoConfig.for_model({"latent": "deepseek_v3", "delta": "qwen3_5_text"}[kind], **sizes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()


def timed(run: Callable[[], Any], times: int) -> float:
    """Returns the seconds of the fastest of some runs, after one that compiles."""
    run()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def ours(config: nnx.models.DecoderConfig, prompts: dict[int, np.ndarray], new: int) -> dict[int, float]:
    """Returns the tokens per second of nnx for each number of rows."""
    model = nnx.jit(lambda: nnx.models.Decoder(config, param_dtype=jnp.bfloat16, ctx=nnx.context(0)))()
    found = {}
    for n, tokens in prompts.items():
        start = time.perf_counter()

        def write(tokens: np.ndarray = tokens) -> None:
            nnx.generate(model, tokens, max_new_tokens=new, temperature=0).block_until_ready()

        write()
        compiled, size = time.perf_counter() - start, nnx.count_params(model) / 1e9
        found[n] = n * new / timed(write, 3)
        print(f"  nnx: {size:.2f} B, {n} rows, {found[n]:,.0f} tokens/s, compiled in {compiled:.1f} s", flush=True)
    return found


def theirs(
    kind: str, config: nnx.models.DecoderConfig, prompts: dict[int, np.ndarray], new: int
) -> dict[int, float | None]:
    """Returns the tokens per second of transformers for each number of rows; None if it is not installed."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError:
        return dict.fromkeys(prompts)
    start, new = time.perf_counter(), new // 4  # it writes slowly, and always at the same speed
    model, found = reference(kind, config), {}
    print(f"  transformers: made in {time.perf_counter() - start:.1f} s", flush=True)
    for n, prompt in prompts.items():
        tokens = torch.tensor(prompt, device=next(model.parameters()).device)

        def write(new: int, tokens: Any = tokens) -> None:
            options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False)
            model.generate(tokens, attention_mask=torch.ones_like(tokens), **options).cpu()

        start = time.perf_counter()
        write(4)
        print(f"  transformers: 4 tokens in {time.perf_counter() - start:.1f} s", flush=True)
        start = time.perf_counter()
        write(new)
        found[n] = n * new / (time.perf_counter() - start)
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
        print(f"  transformers: {size:.2f} B, {n} rows, {found[n]:,.0f} tokens/s", flush=True)
    return found


def writing(kind: str, tiny: bool, rows: tuple[int, ...]) -> record.Figures:
    """Measures the tokens written per second by both libraries."""
    config, new = (latent_config if kind == "latent" else delta_config)(tiny), 16 if tiny else 128
    prompts = {n: np.random.default_rng(1).integers(0, config.vocab_size, (n, new)) for n in rows}
    speeds = {"transformers": theirs(kind, config, prompts, new), "nnx": ours(config, prompts, new)}
    return {f"rows: {n}": record.row("tokens/s", {name: found[n] for name, found in speeds.items()}) for n in rows}


def training(tiny: bool) -> record.Figures:
    """Measures a forward and backward pass of one layer, for texts of two lengths."""
    features, dtype = (64, jnp.float32) if tiny else (2048, jnp.bfloat16)
    tokens, lengths = (512, (128, 512)) if tiny else (32768, (2048, 16384))
    options: dict[str, Any] = {"param_dtype": dtype, "ctx": nnx.context(0)}
    heads, width = (4, 16) if tiny else (16, 128)
    layers = {
        "attention": nnx.MultiHeadAttention(heads, features, use_bias=False, **options),
        "gated delta": nnx.GatedDeltaNet(features, heads, width, **options),
    }

    @nnx.jit
    def step(layer: Any, x: jax.Array) -> Any:
        return nnx.grad(lambda layer, x: layer(x, is_causal=True).astype(jnp.float32).sum())(layer, x)

    figures: record.Figures = {}
    for length in lengths:
        x, times = jax.random.normal(jax.random.key(0), (tokens // length, length, features), dtype), {}
        for name, layer in layers.items():
            times[name] = 1e3 * timed(lambda layer=layer, x=x: jax.block_until_ready(step(layer, x)), 5)
            size = nnx.count_params(layer) / 1e6
            print(f"  {tokens // length} x {length}, {name} ({size:.1f} M): {times[name]:.2f} ms", flush=True)
        figures[f"{tokens // length} x {length} tokens"] = record.row("ms", times)
    return figures


def main() -> None:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models; the default without a GPU")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--rows", type=int, nargs="*", default=(1,), help="how many texts are written at once")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="write a record of each part")
    args = parser.parse_args()
    tiny = args.tiny or jax.default_backend() != "gpu"
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    for part in PARTS if args.only is None else (args.only,):
        print(f"{part}:", flush=True)
        figures = training(tiny) if part == "train" else writing(part, tiny, tuple(args.rows))
        if args.out:
            name, command = f"gpu_mixers_{part}", f"python -m benchmarks.gpu.mixers --only {part}"
            record.write(args.out / f"{name}.json", record.make_record(name, command, figures, whole=not tiny))


if __name__ == "__main__":
    main()
