"""The files of published models: `config.json` and tensors, as configs and parameters."""
