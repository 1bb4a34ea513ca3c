"""`python -m ops` is `baton`."""

from ops.cli import main

main()
