"""Pure planning and values: all of Holdfast that decides, and nothing that touches the world.

No module here imports torch, grpc, kopf, asyncio, os, time or random (an import contract checks
it). Functions take `now`, sizes and topology as arguments and return frozen plans with their
reason; ties break by sorted name, so that every rank computes the same plan.
"""
