"""The networks, data and recipes of the paper's experiments: `polarprune train` and `eval`.

networks → data → recipes → training → run → concrete → methods. The library itself does not need
any of this.
"""
