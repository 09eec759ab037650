"""Looking at a model and at a run. See README.md in this folder."""
