"""A sampler on a vLLM server."""
