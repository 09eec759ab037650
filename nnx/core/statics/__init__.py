"""Static values: how they are compared, copied and watched."""
