"""Generate the `MoETrainingJob` resource for API servers, and its reference, from the job's types.

Nothing here runs in the operator: `python -m holdfast_operator.crd` writes the files that the
repository holds, and `make check` compares them.
"""
