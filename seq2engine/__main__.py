"""The `seq2engine` command. It heeds interrupts from its first moment on, before anything larger is imported."""

from seq2engine.cli.exits import exit_code_of


def main() -> int:
    return exit_code_of(command_line)


def command_line() -> int:
    from seq2engine.cli.main import run_command_line

    return run_command_line()


if __name__ == "__main__":
    raise SystemExit(main())
