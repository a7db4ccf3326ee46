"""Per-unit gradients and their clipped sum: rules for layers, plans for models, fused layers for speed."""
