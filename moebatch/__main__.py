"""Entry point: `python -m moebatch` and the `moebatch` command."""

from moebatch.cli.app import main

if __name__ == "__main__":
    main()
