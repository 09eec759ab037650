"""One of two processes of test_processes: joins the other, trains on the devices of both, prints one JSON object."""

import json
import sys
from pathlib import Path

import jax

import nnx

sys.path.insert(0, str(Path(__file__).parent))
from transformer import mesh_of, train  # noqa: E402

if __name__ == "__main__":
    address, process_id = sys.argv[1], int(sys.argv[2])
    jax.distributed.initialize(address, num_processes=2, process_id=process_id, initialization_timeout=100)
    losses, optimizer, batch = train(mesh_of(("data", 2), ("model", 4)), nnx.fsdp_tensor_parallel_rules())
    table = optimizer.model.embed.embedding
    found = {
        "devices": [jax.device_count(), jax.local_device_count()],
        "losses": losses,
        "part": list(table.addressable_shards[0].data.shape),
        "parts here": len(table.addressable_shards),
        "batch here": sorted({shard.index[0].start or 0 for shard in batch.addressable_shards}),
    }
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()
