"""The command line: the parser of all commands, usage errors, exit codes, interrupts."""
