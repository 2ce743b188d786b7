"""The `holdfast` command, which people run at a terminal.

`commands` holds its subcommands, each imported when it is used; `local` runs a job on virtual nodes
of this machine, `planner` implements `holdfast plan` and `holdfast simulate`, and `demo` runs jobs
that lose ranks and nodes, and checks the result.
"""
