"""The `seq2engine` command. Interrupts are handled from the start, before anything large is imported."""

from seq2engine.cli.exits import exit_code_of


def main() -> int:
    return exit_code_of(command_line)


def command_line() -> int:
    from seq2engine.cli.main import run_command_line

    return run_command_line()


if __name__ == "__main__":
    raise SystemExit(main())
