"""Holdfast as a storage of torch.distributed.checkpoint.

    import torch.distributed.checkpoint as dcp
    from holdfast.dcp import HoldfastReader

    dcp.load(state_dict, storage_reader=HoldfastReader("s3://bucket/tier", job="moe"))

`load_into` does it for a model of plain tensors, whatever share of the experts a rank holds.

A module of its own, because torch takes a second to import its checkpoints.
"""

from holdfast._dcp_load import load_into
from holdfast._dcp_reader import HoldfastReader
from holdfast_core.set_tensors import REPLICATED, Reading

__all__ = ["REPLICATED", "HoldfastReader", "Reading", "load_into"]
