"""The peers' networks in torch, JAX and Triton. Part of the source tree, not of the wheel."""
