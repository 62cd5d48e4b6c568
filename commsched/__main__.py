"""``python -m commsched``: the command line, for torchrun."""

from commsched.cli import main

if __name__ == "__main__":
    main()
