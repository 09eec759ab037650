"""The structure of a graph of Modules: walked, cached, and built again. See README.md in this folder."""
