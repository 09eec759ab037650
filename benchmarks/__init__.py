"""Side by side with hand-written JAX and with peers: one file a question, `make bench` prints one table."""
