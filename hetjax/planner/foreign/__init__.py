"""Profiles of other tools: what layers take, read from a file, and plans made of that alone."""
