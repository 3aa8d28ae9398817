"""Policy, sessions and the in-process sampler on Hugging Face models."""
