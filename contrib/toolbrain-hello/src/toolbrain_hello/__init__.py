"""A toolbrain plugin: the reward `hello`."""
