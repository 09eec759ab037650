"""JAX transforms, lifted to take Modules. See README.md in this folder."""
