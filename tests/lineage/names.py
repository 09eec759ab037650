"""The public names of the earlier versions of NNX, and the table in docs/migrating.md that says what they are today.

`python -m tests.lineage.names` writes the table. Its answers are those of the errors.
"""

import pathlib

import nnx

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "migrating.md"
BEGIN, END = "<!-- earlier names -->\n", "<!-- /earlier names -->\n"

_NAMES = {
    "0.0.2": """
        apply BatchNorm celu Conv current_scope dataclass Dropout elu field fork_scope gelu get_flag glu grad
        hard_sigmoid hard_silu hard_swish hard_tanh init jit jit_filter leaky_relu Linear log_sigmoid
        log_softmax logsumexp make_rng Module ModuleDef normalize one_hot param Partition ref relu relu6
        RngStream Scope scope selu sigmoid silu soft_sign softmax softplus standardize static_field swish tanh
    """,
    "0.0.3": """
        BatchNorm celu clone constant Context Conv Dag DagDef dataclass delta_orthogonal Deref deref
        DerefedMod Dropout elu Embed field gelu get_partition glorot_normal glorot_uniform glu grad
        hard_sigmoid hard_silu hard_swish hard_tanh he_normal he_uniform Index Initializer jit jit_filter
        kaiming_normal kaiming_uniform LayerNorm leaky_relu lecun_normal lecun_uniform Linear log_sigmoid
        log_softmax logsumexp Module ModuleDef node_field normal normalize NOTHING one_hot ones orthogonal
        param Partition partition Pytree PytreeMeta Ref ref ref_metadata Referential RefField RefMetadata relu
        relu6 reref RngStream selu sigmoid silu soft_sign softmax softplus standardize static_field swish tanh
        tree_partition uniform update_refs Value variance_scaling with_partitioning xavier_normal
        xavier_uniform zeros
    """,
    "0.0.4": """
        BatchNorm buffers celu constant Context Conv delta_orthogonal Dropout elu Embed gelu glorot_normal
        glorot_uniform glu grad hard_sigmoid hard_silu hard_swish hard_tanh he_normal he_uniform Initializer
        is_node jit kaiming_normal kaiming_uniform LayerNorm leaky_relu lecun_normal lecun_uniform Linear
        log_sigmoid log_softmax logsumexp Map Module ModuleDef node normal normalize one_hot ones orthogonal
        param PureModule register_node_type relu relu6 RngStream selu Sequence sigmoid silu soft_sign softmax
        softplus standardize State swish tanh TraceContextError TrainState uniform var var_metadata Variable
        variance_scaling VarMetadata with_partitioning xavier_normal xavier_uniform zeros
    """,
    "0.0.6": """
        All BatchNorm buffers celu Container Context context Conv dataclass Dict Dropout elu Embed field gelu
        glu grad hard_sigmoid hard_silu hard_swish hard_tanh initializers is_node jit LayerNorm leaky_relu
        Linear log_sigmoid log_softmax logsumexp Module ModuleDef Node node node_field normalize Not one_hot
        param param_field Pure PureModule Pytree register_node_type relu relu6 RngStream scan selu Sequence
        sigmoid silu soft_sign softmax softplus standardize State Static static static_field swish tanh
        TraceContextError TrainState var var_field var_metadata Variable VarMetadata with_partitioning
    """,
    "0.0.7 and 0.0.8": """
        All BatchNorm BatchStat buffers Cache celu Container ContainerMetadata Context context Conv dataclass
        Dict Dropout elu Embed field gelu get_partition_spec glu grad hard_sigmoid hard_silu hard_swish
        hard_tanh initializers Intermediate is_node jit LayerNorm leaky_relu Linear log_sigmoid log_softmax
        logical_axis_rules logical_to_mesh logsumexp Module ModuleDef Node node_field normalize Not one_hot
        Param param_field PARTITION_NAME Pure PureModule Pytree register_node_type relu relu6 remat Remat scan
        Scan selu Sequence sigmoid silu soft_sign softmax softplus standardize State Static static_field swish
        tanh TraceContextError TrainState TreeNode var_field Variable with_logical_constraint
        with_logical_partitioning with_metadata
    """,
}

PUBLIC_NAMES: dict[str, list[str]] = {
    version: names.split() for versions, names in _NAMES.items() for version in versions.split(" and ")
}
"""What `import nnx` offered, by version."""

INITIALIZERS = """
    constant delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform Initializer kaiming_normal
    kaiming_uniform lecun_normal lecun_uniform normal ones orthogonal uniform variance_scaling xavier_normal
    xavier_uniform zeros
""".split()
"""The names of versions 0.0.3 and 0.0.4 that belong to `nnx.initializers`."""

ALL_NAMES: list[str] = sorted(
    {name for names in PUBLIC_NAMES.values() for name in names}, key=lambda name: (name.lower(), name)
)


def hint_of(name: str) -> str | None:
    """What to write instead, according to the error for `nnx.<name>`; None if the name is there."""
    try:
        getattr(nnx, name)
    except AttributeError as error:
        return str(error).partition(" Here: ")[2].removesuffix(".")
    return None


HINTS: dict[str, str] = {name: hint for name in ALL_NAMES if (hint := hint_of(name)) is not None}
"""What to write instead of names that are not here any more."""


def versions_of(name: str) -> str:
    """The versions that had a name, such as "0.0.2, 0.0.3 and 0.0.6 to 0.0.8"."""
    releases = list(PUBLIC_NAMES)
    runs: list[list[str]] = []
    for i, release in enumerate(releases):
        if name in PUBLIC_NAMES[release]:
            if runs and runs[-1][-1] == releases[i - 1]:
                runs[-1].append(release)
            else:
                runs.append([release])
    *rest, last = [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else run)]
    return f"{', '.join(rest)} and {last}" if rest else last


def answer(name: str) -> str:
    """What to write today for a name."""
    return HINTS.get(name, "the same; also in `nnx.initializers`" if name in INITIALIZERS else "the same")


def table() -> str:
    """The table as Markdown: a row for the names that the same versions had and that have the same answer."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in sorted(ALL_NAMES, key=lambda name: (name not in HINTS, name not in INITIALIZERS)):
        rows.setdefault((versions_of(name), answer(name)), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {versions} | {today} |" for (versions, today), names in rows.items()]
    return "\n".join(["| name | in | today |", "|---|---|---|", *lines]) + "\n"


def write_table() -> None:
    """Replaces the table of the page."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    write_table()
