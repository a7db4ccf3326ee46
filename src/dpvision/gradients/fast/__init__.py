"""Faster ways to the same gradients: a model's graph with fused and native layers in it."""

from dpvision.gradients.fast import small_layers as small_layers  # these register their rules
from dpvision.gradients.fast import weight_gradients as weight_gradients
from dpvision.gradients.fast.rewrite import fast_twin as fast_twin
from dpvision.gradients.fast.rewrite import frozen_values as frozen_values
from dpvision.gradients.fast.small_layers import SkinnyLinear as SkinnyLinear
from dpvision.gradients.fast.weight_cache import held_through_step as held_through_step
