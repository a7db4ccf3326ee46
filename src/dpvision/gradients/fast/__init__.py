"""A fused copy of a model: its graph with faster layers, which compute the same outputs and per-unit gradients.

``rewrite`` traces a model and puts the layers in; ``fused_layer`` is their base, with the cache of what they derive
from weights; ``fused_conv``, ``fused_norm`` and ``small_layers`` are the layers; ``weight_gradients`` has the gradient
rules of Winograd convolutions. Importing the package registers the rules.
"""

from dpvision.gradients.fast import small_layers as small_layers
from dpvision.gradients.fast import weight_gradients as weight_gradients
from dpvision.gradients.fast.fused_layer import weight_cache as weight_cache
from dpvision.gradients.fast.rewrite import frozen_callable as frozen_callable
from dpvision.gradients.fast.rewrite import frozen_values as frozen_values
from dpvision.gradients.fast.rewrite import fused_copy as fused_copy
from dpvision.gradients.fast.rewrite import fused_graph as fused_graph
from dpvision.gradients.fast.small_layers import NarrowLinear as NarrowLinear
