"""Plans: whether a step fits a machine, and how fast it can be, by its real compiler. See README.md in this folder."""
