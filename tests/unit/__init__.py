"""A folder for each package of the library."""
