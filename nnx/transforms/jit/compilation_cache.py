"""The persistent compilation cache: compiled programs in a folder, from one run of a program to the next."""

import os
import pathlib

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache


def compilation_cache(directory: str | os.PathLike[str] | None = None) -> str:
    """Keeps compiled programs in a folder, so that later runs of the same program start without compiling.

    JAX has such a cache, but by default it leaves out programs that compile in less than a second, which are nearly all
    programs of small models and all of those that initialize parameters. This keeps every program. Call
    `nnx.compilation_cache()` at the top of a script: programs that were compiled before the call are not kept. Several
    processes may share a folder.

    The same with environment variables, for programs that cannot be changed:

        JAX_COMPILATION_CACHE_DIR=some/folder
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

    JAX never deletes from the folder, unless `jax_compilation_cache_max_size` limits its bytes. It is always safe to
    delete it.

    Args:
        directory: the folder; a bucket such as "gs://bucket/folder" works where JAX supports it. By default the one
            that JAX was configured with, such as by `JAX_COMPILATION_CACHE_DIR`, or else a folder "nnx" in the user's
            cache folder (`XDG_CACHE_HOME`, or `~/.cache`).

    Returns:
        The folder.
    """
    before = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009  type checkers do not know the setting
    folder = os.fspath(directory or before or _default_folder())
    if folder != before:
        jax_cache.reset_cache()  # otherwise JAX goes on with what it found when it first compiled something
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def _default_folder() -> str:
    return str(pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nnx")
