"""Builds one model, takes one training step, and prints the seconds of processor time of each part as JSON.

python -m benchmarks.cold.run nnx cnn             imports, builds and takes a step
python -m benchmarks.cold.run nnx cnn --build     stops after building
"""

import importlib
import json
import sys
import time


def main() -> None:
    library, name, *options = sys.argv[1:]
    marks = {"started": time.process_time()}
    models = importlib.import_module(f"benchmarks.cold.{library}_models")
    marks["import"] = time.process_time()
    model = models.MODELS[name]()
    _wait()
    marks["build"] = time.process_time()
    if "--build" not in options:
        from benchmarks.cold.batches import batch

        loss = models.first_loss(model, *batch(name))
        assert 1 < loss < 10, loss
        marks["step"] = time.process_time()
    ends = list(marks.values())
    parts = {part: end - begin for part, begin, end in zip(list(marks)[1:], ends, ends[1:])}
    print(json.dumps({**parts, "total": ends[-1]}))


def _wait() -> None:
    """Waits for arrays that JAX is still computing."""
    if "jax" in sys.modules:
        jax = sys.modules["jax"]
        jax.block_until_ready(jax.live_arrays())


if __name__ == "__main__":
    main()
