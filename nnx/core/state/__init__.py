"""State and its relatives: filters, paths, Pure and ModuleDef."""
