"""The command line: one module a subcommand, each with its arguments and a ``run``."""
