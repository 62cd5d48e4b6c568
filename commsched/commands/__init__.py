"""The commands of ``commsched``, one a file, each called `command`; `cli` loads them by name."""
