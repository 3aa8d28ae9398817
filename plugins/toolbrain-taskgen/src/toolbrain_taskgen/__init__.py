"""Tasks made from an agent's tools: plans that were executed, and queries that ask for them."""
