"""Layers as torch's own functions, a family a file; torch_network puts them together."""
