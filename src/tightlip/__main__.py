"""`python -m tightlip` is the `tightlip` command."""

from tightlip.cli.main import main

main()
