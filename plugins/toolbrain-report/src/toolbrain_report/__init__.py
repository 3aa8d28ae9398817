"""Plots of toolbrain runs."""
