"""Parts of AOTAutograd."""

from torch._functorch import config, partitioners, predispatch
