"""The files of published models: `config.json` and tensors. See README.md in this folder."""
