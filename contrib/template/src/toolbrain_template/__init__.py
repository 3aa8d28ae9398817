"""A toolbrain plugin."""
