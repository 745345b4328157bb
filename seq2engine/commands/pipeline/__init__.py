"""All stages in one command: the demo without a GPU, and the check on a machine that has one."""
