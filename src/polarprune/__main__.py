"""`python -m polarprune`"""

from .cli.app import app

app(prog_name="polarprune")
