"""Trains a language model from text files: tokenizer, packed data, model, samples, and a directory to go on from.

    python examples/programs/pretrain.py                        a small model on a laptop, a GPT-2-sized one on a GPU
    python examples/programs/pretrain.py --text *.txt notes     your own text: files, and folders of them
    python examples/programs/pretrain.py --resume --steps 4000  go on from the last checkpoint, with the next batch
    python examples/programs/pretrain.py --size gpt2 --plan h100-8 v5e-16    whether it would fit there, and how fast
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/programs/pretrain.py --model-axis 2

The default text is what every Python ships: its documentation and its library. A byte-pair tokenizer is trained on it
first. Documents are packed into rows, so that no token is padding, and attention keeps them apart. Hidden matrices are
trained by Muon, everything else by AdamW; the learning rate warms up, stays, and decays at the end (WSD). A checkpoint
holds the position in the data, so a run that was killed goes on as if nothing had happened.

The figure to compare is bits per byte of held-out text, which does not depend on the tokenizer. Checkpoints, metrics
and samples go to examples/output/pretrain/, the model to examples/output/pretrain/model/, as it is published.
"""

import argparse
import itertools
import json
import math
import pathlib
import shutil
import sysconfig
import time
from pydoc_data.topics import topics
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from jax.sharding import AxisType, PartitionSpec

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

on_gpu = jax.default_backend() == "gpu"
SIZES = {  # vocabulary, layers, heads, width, tokens per row, rows per step
    "smoke": (300, 2, 2, 32, 64, 8),
    "small": (2048, 4, 4, 128, 128, 16),
    "gpt2": (50304, 12, 12, 768, 1024, 64),  # 124 million parameters
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", type=pathlib.Path, nargs="+", help="text files, a document each, and folders")
parser.add_argument("--size", choices=SIZES, help="of the model; by default, what suits the machine")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--rate", type=float, default=0.02, help="Muon's learning rate; that of AdamW is a tenth of it")
parser.add_argument("--accumulate", type=int, default=1, help="steps whose gradients make one update")
parser.add_argument("--model-axis", type=int, default=1, help="devices that share heads and hidden units")
parser.add_argument("--plan", nargs="+", metavar="MACHINE", help="only plan a step for these, see nnx.plan")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
parser.add_argument("--output", type=pathlib.Path, help="where everything goes")
parser.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = parser.parse_args()
size = args.size or ("smoke" if args.smoke else "gpt2" if on_gpu else "small")
if args.smoke:
    args.steps = min(args.steps, 40)
vocab, layers, heads, width, length, rows = SIZES[size]
output = args.output or pathlib.Path(__file__).parent.parent / "output" / f"pretrain{'-smoke' if args.smoke else ''}"
if not args.resume:
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    (output / "metrics.jsonl").unlink(missing_ok=True)
output.mkdir(parents=True, exist_ok=True)

# The text. Every twentieth document is held out.

SUFFIXES = (".md", ".py", ".rst", ".txt")  # what is read in folders
began = time.perf_counter()


def read_documents() -> list[str]:
    if args.text:
        inside = [sorted(path.rglob("*")) if path.is_dir() else [path] for path in args.text]
        files = [file for file in itertools.chain(*inside) if file in args.text or file.suffix in SUFFIXES]
        return [file.read_text("utf-8", "replace") for file in files]
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))[: 10 if args.smoke else None]
    if size == "gpt2":
        files += sorted(path for path in library.glob("*/*.py") if path.parent.name not in ("test", "site-packages"))
    texts = [text for _, text in sorted(topics.items())]
    return texts[: 40 if args.smoke else None] + [file.read_text("utf-8", "replace") for file in files]


documents = read_documents()
held_out = documents[::20]
documents = [text for i, text in enumerate(documents) if i % 20] or documents

# The tokenizer: byte pairs, learned from the text, so that every text has tokens and none is unknown.

model_directory = output / "model"
model_directory.mkdir(exist_ok=True)
if not (args.resume and (model_directory / "tokenizer.json").exists()):
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    learned.train_from_iterator(documents, trainer)
    learned.save(str(model_directory / "tokenizer.json"))
    (model_directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    (model_directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))
encoder = tokenizers.Tokenizer.from_file(str(model_directory / "tokenizer.json"))  # on all cores
tokenizer = nnx.models.Tokenizer.from_pretrained(model_directory)
learned_at = time.perf_counter()
START = 0  # "<s>", before each document

# The data. Long documents are cut; Grain shuffles the pieces and packs them into rows, and says where each begins.


def pieces(texts: list[str]) -> list[dict[str, np.ndarray]]:
    found = []
    for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False):
        tokens = np.array([START, *encoding.ids], np.int32)
        found += [{"tokens": tokens[i : i + length + 1]} for i in range(0, len(tokens) - 1, length)]
    return found


source = pieces(documents)
print(
    f"{sum(map(len, documents)):,} characters of text, {sum(len(piece['tokens']) - 1 for piece in source):,} tokens: "
    f"tokenizer {learned_at - began:.1f} s, tokens {time.perf_counter() - learned_at:.1f} s"
)
packed = grain.experimental.FirstFitPackIterDataset(
    grain.MapDataset.source(source).seed(0).shuffle().repeat().to_iter_dataset(),
    length_struct={"tokens": length + 1},
    num_packing_bins=rows,
).batch(rows, drop_remainder=True)
mesh = jax.make_mesh(
    (jax.device_count() // args.model_axis, args.model_axis), ("data", "model"), axis_types=(AxisType.Auto,) * 2
)
rules = nnx.fsdp_tensor_parallel_rules()
batches = nnx.prefetch(packed, sharding=jax.sharding.NamedSharding(mesh, PartitionSpec("data")))

# The model and its optimizer, split over the mesh from the start.

config = nnx.models.DecoderConfig(
    model_type="llama",
    vocab_size=vocab,
    features=width,
    hidden_features=64 * math.ceil(width * 8 / 3 / 64),
    num_layers=layers,
    num_heads=heads,
    max_length=length,
    tie_embeddings=True,
)
updates = max(2, args.steps // args.accumulate)


def schedule(peak: float) -> optax.Schedule:
    """Warms up, stays, and decays over the last fifth."""
    warm, decay = max(1, updates // 20), updates // 5
    parts = [
        optax.linear_schedule(0.0, peak, warm),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, 0.0, decay),
    ]
    return optax.join_schedules(parts, [warm, updates - decay])


def build(ctx: nnx.Context) -> nnx.Optimizer:
    dtype = jnp.bfloat16 if on_gpu else None
    model = nnx.models.Decoder(config, dtype=dtype, scan_layers=True, ctx=ctx)
    dimensions: Any = nnx.muon_dimensions(model)
    muon = optax.contrib.muon(
        schedule(args.rate),
        adam_learning_rate=schedule(args.rate / 10),
        muon_weight_dimension_numbers=dimensions,
    )
    steps = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), muon), args.accumulate)
    return nnx.Optimizer(model, steps.gradient_transformation())


def loss_fn(model: nnx.models.Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean loss of the tokens that follow another one of the same piece."""
    tokens, segments = batch["tokens"], batch["tokens_segment_ids"]  # [rows, length + 1]
    mask = nnx.make_segment_mask(segments[:, :-1], dtype=bool)
    features = model.features(tokens[:, :-1], positions=batch["tokens_positions"][:, :-1], mask=mask)
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return nnx.linear_cross_entropy(features, model.head_kernel, tokens[:, 1:], mask=follows)


@nnx.jit(donate_argnums=0)
def train_step(optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, batch)
    optimizer.update(grads)
    return loss


if args.plan:  # nothing is allocated
    each = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)
    planned = {"tokens": each, "tokens_segment_ids": each, "tokens_positions": each}
    print(nnx.plan(train_step, nnx.eval_shape(build, nnx.context(0)), planned, on=args.plan, progress=True))
    raise SystemExit

eval_loss = nnx.jit(loss_fn)


def bits_per_byte(model: nnx.models.Decoder) -> float:
    """Returns the mean number of bits that the model needs for a byte of the held-out documents."""
    each = pieces(held_out)[: 2 * rows if args.smoke else 16 * rows]
    total = count = 0.0
    for first in range(0, len(each) - rows + 1, rows):
        part = [piece["tokens"] for piece in each[first : first + rows]]
        tokens = np.stack([np.pad(row, (0, length + 1 - len(row))) for row in part])
        real = np.arange(length + 1) < np.array([len(row) for row in part])[:, None]
        positions = np.broadcast_to(np.arange(length + 1, dtype=np.int32), tokens.shape)
        batch = {"tokens": tokens, "tokens_segment_ids": real.astype(np.int32), "tokens_positions": positions}
        predicted = real[:, 1:].sum()
        total += float(eval_loss(model, batch)) * predicted
        count += sum(len(tokenizer.decode(row[1:]).encode()) for row in part)
    return total / count / math.log(2)


# Training

first, seconds, losses = 0, 0.0, []
with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
    optimizer = nnx.init_sharded(build, mesh, rules, nnx.context(0))
    model = optimizer.model
    everything = {"optimizer": optimizer, "data": batches}
    manager = nnx.CheckpointManager(
        output / "checkpoints", every_steps=max(1, args.steps // 4), keep_last=2, save_on_sigterm=True
    )
    if args.resume:
        first = manager.resume(everything) or 0
    print(
        f"{len(source):,} pieces of text, {nnx.count_params(model):,} parameters, mesh {dict(mesh.shape)}, "
        f"{rows} × {length} tokens a step, steps {first} to {args.steps}"
    )
    before = bits_per_byte(model)
    with manager, nnx.TrainLog(args.steps, output, name="pretrain", interval=5) as log:
        for step in range(first, args.steps):
            loss = train_step(optimizer, next(batches))
            losses.append(loss)
            if step == first:  # which compiles
                loss.block_until_ready()
                began = time.perf_counter()
            log(step, loss=loss)
            manager.save(step + 1, everything, force=step + 1 == args.steps)
    losses = [float(loss) for loss in losses]
    if len(losses) > 1:
        speed = (len(losses) - 1) * rows * length / (time.perf_counter() - began)
        print(f"{speed:,.0f} tokens/s on {jax.devices()[0].device_kind}; the last loss is {losses[-1]:.6f}")
    after = bits_per_byte(model)
    print(f"bits per byte of held-out text: {before:.3f} before, {after:.3f} after")

    # What it has learned, and the model as it is published: `evaluate.py` and `finetune.py` read it.

    prompt = "The"  # a space would keep the next word from having its own, as it has in the text
    written = nnx.generate(
        model,
        np.array([[START, *tokenizer.encode(prompt, add_special_tokens=False)]]),
        max_new_tokens=min(60, length // 2),
        temperature=0.8,
        top_k=50,
        ctx=nnx.context(sample=0),
    )
    print(prompt + tokenizer.decode(np.asarray(written)[0]))
    nnx.models.save_pretrained(model, model_directory)
assert first or after < 0.9 * before, (before, after)
print(f"final bits per byte: {after:.3f}")
