"""A language model on any number of processes and devices: the same script on a laptop, under SLURM and on Kubernetes.

    python examples/distributed/train.py            one process, with all its devices
    make distributed                                a rehearsal: two processes on this machine, killed and resumed
    srun python examples/distributed/train.py       one process per task of a SLURM job

On Kubernetes, run it as an indexed Job with `pip install "jax[k8s]"`; JAX asks the cluster for the other processes.

Every process reads its own part of each batch, holds its own part of the parameters and writes its own part of each
checkpoint; process 0 alone writes the log. When the scheduler sends SIGTERM, all processes save the same step and end.
When a process dies, the others end with an error, and the last line of each says what to do: start the job again, with
as many processes and devices as you like, and it continues from the last checkpoint. Tokens are the bytes of Python's
own documentation.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import traceback
from pydoc_data.topics import topics

import jax
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--model-axis", type=int, default=1, help="devices that share the heads and hidden units")
parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
parser.add_argument("--heartbeat", type=int, default=60, help="seconds after which a silent process counts as dead")
parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parents[1] / "output/distributed")
parser.add_argument("--smoke", action="store_true", help="a tiny model, for the tests")
args = parser.parse_args()

VOCAB, BATCH, LENGTH = 256, 16, 32 if args.smoke else 64
WIDTH, HEADS, LAYERS = (32, 4, 1) if args.smoke else (64, 8, 2)

# Join the other processes, before anything touches a device. JAX reads address and numbers from the environment.

# Any pod has KUBERNETES_SERVICE_HOST, also one that is alone. The index is set for the pods of an indexed Job.
CLUSTERS = ("SLURM_STEP_NODELIST", "JOB_COMPLETION_INDEX", "OMPI_MCA_orte_hnp_uri", "TPU_WORKER_HOSTNAMES")
if any(name in os.environ for name in CLUSTERS):
    jax.distributed.initialize(heartbeat_timeout_seconds=args.heartbeat)
process, processes = jax.process_index(), jax.process_count()

# One mesh over the devices of all processes. The model axis has the most traffic, so it stays within a process.

shape = (jax.device_count() // args.model_axis, args.model_axis)
mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
rules = nnx.fsdp_tensor_parallel_rules()

# The data. The batch of a step depends on its number alone: a resumed job needs no other position in the data, and gets
# the same batches on any number of processes.

text = np.frombuffer("\n".join(topic for _, topic in sorted(topics.items())).encode(), np.uint8)
rows = BATCH // processes
batch_sharding = nnx.logical_to_mesh_sharding(PartitionSpec("batch"), mesh, rules)


def batches(first):
    for step in range(first, args.steps):
        starts = np.random.default_rng(step).integers(0, len(text) - LENGTH - 1, BATCH)  # [batch]
        mine = starts[rows * process : rows * (process + 1)]  # [batch / processes]
        yield text[mine[:, None] + np.arange(LENGTH + 1)].astype(np.int32)  # [batch / processes, length + 1]


# The model and its optimizer, split over the mesh from the start

config = nnx.models.DecoderConfig(
    model_type="llama",
    vocab_size=VOCAB,
    features=WIDTH,
    hidden_features=4 * WIDTH,
    num_layers=LAYERS,
    num_heads=HEADS,
    max_length=LENGTH,
)


def build(ctx):
    model = nnx.models.Decoder(config, scan_layers=True, ctx=ctx)
    return nnx.Optimizer(model, optax.adamw(3e-3, weight_decay=0.01))


@nnx.jit(donate_argnums=0)
def train_step(optimizer, tokens):  # _, [batch, length + 1]
    def loss_fn(model):
        logits = model(tokens[:, :-1])  # [batch, length, vocab]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
    optimizer.update(grads)
    return loss


def train():
    optimizer = nnx.init_sharded(build, mesh, rules, nnx.context(0))
    manager = nnx.CheckpointManager(args.output / "checkpoints", every_steps=args.save_every, save_on_sigterm=True)
    first = manager.resume(optimizer) or 0
    if process == 0:
        print(f"{processes} processes, mesh {dict(mesh.shape)}, steps {first} to {args.steps}", flush=True)
    loss = None
    with manager, nnx.TrainLog(args.steps, args.output, name="distributed", interval=5) as log:
        for step, tokens in enumerate(nnx.prefetch(batches(first), sharding=batch_sharding), first):
            loss = train_step(optimizer, tokens)
            log(step, loss=loss)
            manager.save(step + 1, optimizer, force=step + 1 == args.steps)
    return loss


RESUME = "Start the job again: it continues from the last checkpoint in {output}."
FAILED = """process {process} of {processes} ends, because {reason}
If another process has died, that is the cause. {resume}"""
ABORTED = """process {process} of {processes} was ended from outside, or by JAX. If JAX says above that a task died or \
is unhealthy, look at the log of that task. {resume}"""

# If another process dies, JAX aborts this one from C++, where no Python code can run. So a shell waits for the end of
# this process, ignoring signals meant for the job. It writes a last line, unless this process says goodbye first.

about = {"process": process, "processes": processes, "resume": RESUME.format(output=args.output)}
LAST_LINE = ["sh", "-c", 'trap "" INT TERM; read -r goodbye || printf "%s\\n" "$0" >&2', ABORTED.format(**about)]
last_line = subprocess.Popen(LAST_LINE, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

try:
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        final_loss = train()
except Exception as error:
    last_line.communicate("goodbye\n")
    if processes == 1:
        raise
    traceback.print_exc()
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    print(FAILED.format(reason=reason, **about), file=sys.stderr, flush=True)
    os._exit(1)  # at once: a regular exit would wait for the other processes, and they may be waiting for this one
except BaseException:  # SIGTERM after a save, or Ctrl-C
    last_line.communicate("goodbye\n")
    raise
if process == 0:
    done = f"{args.output} already has step {args.steps}; remove it to start over"
    print(done if final_loss is None else f"final loss: {float(final_loss):.3f}")
last_line.communicate("goodbye\n")
