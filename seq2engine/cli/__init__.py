"""The command line itself: parser, flags that commands share, usage errors, exit codes."""
