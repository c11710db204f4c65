"""Networks as torch, JAX and Triton have them: what peers run. Part of the source tree, not of the wheel."""
