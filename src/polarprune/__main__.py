"""`python -m polarprune`: the command line."""

from .cli.entry import main

main()
