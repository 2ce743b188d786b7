"""The subcommands of `holdfast`, one module each, imported when it is used."""
