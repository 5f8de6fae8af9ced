"""The command line: thin, one file per command group."""
