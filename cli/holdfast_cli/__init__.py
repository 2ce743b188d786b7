"""The `holdfast` command: what people run at a terminal.

`commands` are its subcommands, each imported when it is used; `local` runs a job on virtual nodes
of this machine, `planner` answers `holdfast plan` and `holdfast simulate`, `demo` shows all of it
at once.
"""
