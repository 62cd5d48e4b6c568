"""``python -m commsched``: the command line."""

from commsched.cli import main

main()
