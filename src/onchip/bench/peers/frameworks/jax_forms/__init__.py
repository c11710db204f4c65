"""Layers as functions of JAX, a family a file; jax_network puts them together."""
