"""Every way to misuse the library that we know of, as a table, and the error each must give."""
