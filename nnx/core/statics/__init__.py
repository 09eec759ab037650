"""Static values: how they are compared, copied and watched. See README.md in this folder."""
