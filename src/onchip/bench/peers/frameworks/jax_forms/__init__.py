"""Layers as functions of JAX, one file per family; jax_network assembles them."""
