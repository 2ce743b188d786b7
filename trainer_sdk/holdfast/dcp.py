"""Holdfast as a storage of torch.distributed.checkpoint.

    import torch.distributed.checkpoint as dcp
    from holdfast.dcp import HoldfastReader

    dcp.load(state_dict, storage_reader=HoldfastReader("s3://bucket/tier", job="moe"))

`load_into` does the same for a model of plain tensors, whatever share of the experts a rank holds.

`HoldfastWriter` gives a trainer that calls `dcp.async_save` the memory tier.

`holdfast` does not import this module, because torch takes a second to import its checkpoints.
"""

from holdfast._dcp.load import load_into
from holdfast._dcp.reader import HoldfastReader
from holdfast._dcp.writer import HoldfastWriter
from holdfast_core.durable.set_tensors import REPLICATED, Reading

__all__ = ["REPLICATED", "HoldfastReader", "HoldfastWriter", "Reading", "load_into"]
