"""Layers as torch functions, one file per family; torch_network assembles them."""
