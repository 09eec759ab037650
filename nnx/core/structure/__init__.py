"""The structure of a graph of Modules: walked, cached, and built again."""
