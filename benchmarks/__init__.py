"""Compares NNX with hand-written JAX and with peers: one file per question; `make bench` prints one table."""
