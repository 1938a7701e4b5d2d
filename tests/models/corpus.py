"""Two named corpora of models from other libraries, each from its own constructor, tiny, with random weights.

``WIDE`` holds every model, ``SMALL`` names those that run by default. The libraries are imported when a model is built:
a process that tests none of their models does not pay for them.
"""

import corpus_diffusers
import corpus_pyg
import corpus_timm
import corpus_torchvision
import corpus_transformers
from zoo import Spec

WIDE: dict[str, Spec] = {
    **corpus_timm.MODELS,
    **corpus_torchvision.MODELS,
    **corpus_diffusers.MODELS,
    **corpus_pyg.MODELS,
    **corpus_transformers.MODELS,
}

#: One or two of each library: batch norms, attention, message passing, routed experts.
SMALL = ("pyg-gat", "timm-test_resnet", "torchvision-squeezenet")
#: What to import for the models whose names begin so.
LIBRARIES = {"pyg": "torch_geometric"}
