"""Shapes of public tensor arguments are checked under test: jaxtyping with beartype, by an import hook."""

from jaxtyping import install_import_hook

# An int is a float here, as it is to pyright.
install_import_hook("tasks.algorithms", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
