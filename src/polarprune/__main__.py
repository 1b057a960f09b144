"""`python -m polarprune`"""

from .cli import app

app(prog_name="polarprune")
