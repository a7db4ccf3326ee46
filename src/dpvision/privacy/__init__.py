"""The privacy guarantee: what is sampled, clipped, noised, divided, charged and handed to the optimizer."""
