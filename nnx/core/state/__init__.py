"""State and its relatives: filters, paths, Pure and ModuleDef. See README.md in this folder."""
