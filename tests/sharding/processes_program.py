"""One of the two processes of test_devices: joins the other, trains on the devices of both, prints one JSON object."""

import json
import sys

import jax

import nnx
from tests.sharding.transformer import make, mesh_of, run

if __name__ == "__main__":
    address, process_id = sys.argv[1], int(sys.argv[2])
    jax.distributed.initialize(address, num_processes=2, process_id=process_id, initialization_timeout=100)
    mesh, rules = mesh_of(("data", 2), ("model", 4)), nnx.fsdp_tensor_parallel_rules()
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        optimizer, batch = make(mesh, rules)
        losses = run(optimizer, batch, 10)
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
