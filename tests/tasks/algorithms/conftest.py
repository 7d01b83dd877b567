"""Shapes of public tensor arguments are checked under test: jaxtyping with beartype, by an import hook."""

from jaxtyping import install_import_hook

install_import_hook("tasks.algorithms", "beartype.beartype")
