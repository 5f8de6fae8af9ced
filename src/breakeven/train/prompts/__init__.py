"""Prompts for training, built from material whose licence allows it: sources, word lists, the target itself."""
