"""A differential fuzzer: random programs on random Modules, lifted by a transform and run eagerly, must agree."""
