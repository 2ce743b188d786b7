"""One command for a bare CUDA machine: a bundle to bring along, and a session that runs there.

`bundle` makes the folder where there is a network, `session` runs the steps of `steps` where there
is none, and `report` turns the results into documents. Nothing of Holdfast imports this package.
"""
