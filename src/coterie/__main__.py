"""`python -m coterie` is the command `coterie`."""

from coterie.cli import main

main()
